"""TorchRec's ``DistributedModelParallel`` for models in which one module with tables has several names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import model_parallel as torchrec_model_parallel
from torchrec.distributed.model_parallel import DataParallelWrapper, get_unwrapped_module
from torchrec.distributed.model_tracker.types import ModelTrackerConfigs
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardedModule,
    ShardingEnv,
    ShardingPlan,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from graphpasses._torch.state_dict import groups_are_kept, module_versions
from graphpasses.embedding.checkpoints import (
    check_shapes,
    keys_message,
    merge_repeated_groups,
    merge_repeated_keys,
    repeat_keys,
)
from graphpasses.embedding.planner import fit_plan
from graphpasses.embedding.planner import plan as make_plan
from graphpasses.embedding.table_names import find_aliases, give_names, one_name_each
from graphpasses.errors import CheckpointError, ShardingError
from graphpasses.identity import IdentityMap, walk_modules


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module, ShardedModule)


class DistributedModelParallel(torchrec_model_parallel.DistributedModelParallel):  # type: ignore[misc]
    """Shards a model's tables; a module that has several names stays one, and is sharded, optimized and saved once.

    A drop-in for ``torchrec.distributed.DistributedModelParallel``, which leaves a second name in the same parent
    unsharded, saves a module under each name in other parents, and shards nothing that is planned under its second
    name. Here a module's names all lead to one sharded module. What lists names once, such as ``state_dict()`` and
    ``named_parameters()``, has the first, in the order of ``named_modules()``. Models that share nothing are sharded
    as by TorchRec.

    Args:
        module: the model, which is sharded in place; also on device meta.
        env: the ranks; None for all.
        device: of the sharded tables and of what is initialized; None for CPU.
        plan: how to shard, under any names of the modules; None for :func:`~graphpasses.embedding.plan`'s.
        sharders: of the module types to shard; None for TorchRec's default.
        init_data_parallel: wrap what is not sharded in DistributedDataParallel now, not when
            :meth:`init_data_parallel` is called.
        init_parameters: give parameters on device meta memory and values.
        data_parallel_wrapper: wraps what is not sharded; None for TorchRec's default.
        model_tracker_configs: see TorchRec.

    Raises:
        ShardingError: the plan does not fit the model, which is left as it was.

    Example:
        >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> table = EmbeddingBagConfig(num_embeddings=100, embedding_dim=16, name="table", feature_names=["product"])
        >>> ebc = EmbeddingBagCollection([table], device=torch.device("meta"))
        >>> towers = nn.ModuleDict({"user": nn.ModuleDict({"ebc": ebc}), "item": nn.ModuleDict({"ebc": ebc})})
        >>> model = DistributedModelParallel(towers)
        >>> model.module["user"]["ebc"] is model.module["item"]["ebc"]
        True
        >>> list(model.state_dict())
        ['user.ebc.embedding_bags.table.weight']
        >>> dist.destroy_process_group()
    """

    _named_optimizer: _FusedOptimizer | None = None

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        plan: ShardingPlan | None = None,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        model_tracker_configs: ModelTrackerConfigs | None = None,
    ) -> None:
        sharders = get_default_sharders() if sharders is None else sharders
        if plan is None:
            group = None if env is None else env.process_group
            plan = make_plan(module, sharders, process_group=group, device=device)
        num_ranks = dist.get_world_size() if env is None else env.world_size
        plan, planned = fit_plan(module, plan, sharders, num_ranks)
        with _as_it_was_on_error(module), one_name_each(module, lambda m: m in planned or _is_sharded(m)):
            super().__init__(
                module,
                env,
                device,
                plan,
                sharders,
                init_data_parallel,
                init_parameters,
                data_parallel_wrapper,
                model_tracker_configs,
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model; refuses TorchRec's pipelines where it calls a module more than once."""
        if torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        try:
            return super().forward(*args, **kwargs)
        except AssertionError as error:
            for names in IdentityMap.of(self.module).modules:
                if f" {names[0]} is not available" in str(error) and len(names) > 1:
                    raise ShardingError(
                        f"the model calls {' and '.join(map(repr, names))}, which is one module, more than once per "
                        "step; TorchRec's pipelines that start input dists early hold one per module. Use "
                        "TrainPipelineBase, or graphpasses.compile, which makes one input dist per distinct input"
                    ) from error
            raise

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name != "_dmp_wrapped_module" and name in self.module._modules:
                raise AttributeError(
                    f"{name!r} is an attribute of the model that DistributedModelParallel wraps: write "
                    f".module.{name}. torch's get_model_state_dict and set_model_state_dict know no such wrapper: "
                    "give model.state_dict() to torch.distributed.checkpoint"
                ) from error
            raise

    def init_data_parallel(self) -> None:
        """Wraps what is not sharded; does nothing when called again."""
        with one_name_each(self.module, _is_sharded):
            super().init_data_parallel()

    def copy(self, device: torch.device) -> DistributedModelParallel:
        """Returns a copy on a device, whose modules have all the names that this one's have."""
        with groups_are_kept(), one_name_each(self.module, _is_sharded) as aliases:
            copied: DistributedModelParallel = super().copy(device)
            give_names(aliases, copied.module)
        return copied

    def reshard(
        self,
        changed_shard_to_params: dict[str, tuple[float, EmbeddingModuleShardingPlan]],
        sharded_module_fqn: str | None = None,
    ) -> float:
        """Moves shards of a module, which keeps all its names and is given by any of them; see TorchRec."""
        identity = IdentityMap.of(self.module)
        changed = {identity.canonical(name): change for name, change in changed_shard_to_params.items()}
        first = None if sharded_module_fqn is None else identity.canonical(sharded_module_fqn)
        volume: float = super().reshard(changed, first)
        for name in changed:
            self._plan.plan |= dict.fromkeys(identity.aliases(name), self._plan.plan[name])
        return volume

    def _named(self, members: str, prefix: str, recurse: bool, once: bool) -> Iterator[tuple[str, Any]]:
        seen: set[Any] = set()
        for fqn, module in walk_modules(get_unwrapped_module(self), is_leaf=_is_sharded):
            fqn = f"{prefix}.{fqn}" if prefix and fqn else prefix or fqn
            list_members = getattr(module, members)
            named = list_members(fqn, recurse) if _is_sharded(module) else list_members(fqn, recurse=False)
            for name, member in named:
                if not once or member not in seen:
                    seen.add(member)
                    yield name, member

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields parameters by their first FQN, or by all; those of sharded tables as this rank's parts."""
        return self._named("named_parameters", prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields buffers by FQN; see :meth:`named_parameters`."""
        return self._named("named_buffers", prefix, recurse, remove_duplicate)

    def sparse_grad_parameter_names(self, destination: list[str] | None = None, prefix: str = "") -> list[str]:
        """Returns the first names of unsharded embeddings whose gradients are sparse."""
        identity = IdentityMap.of(self.module)
        destination = [] if destination is None else destination
        names = super().sparse_grad_parameter_names()
        for name in dict.fromkeys(map(identity.canonical, names)):
            destination.append(f"{prefix}.{name}" if prefix else name)
        return destination

    def state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Returns parameters and buffers, those of a sharded module under its first name."""
        before = set() if destination is None else {*destination}
        state: dict[str, Any] = super().state_dict(destination, prefix, keep_vars)
        seconds = tuple(f"{prefix}{alias.fqn}." for alias in find_aliases(self.module, _is_sharded))
        if seconds:
            for key in [key for key in state if key not in before and key.startswith(seconds)]:
                del state[key]
            versions = module_versions(state)
            for key in [key for key in versions if f"{key}.".startswith(seconds)]:
                del versions[key]
        return state

    def under_all_names(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what :meth:`state_dict` returned, under all names of its modules, as TorchRec saves and loads it.

        TorchRec's ``DistributedModelParallel`` misses a module that does not come under each of its names. The state
        of its fused optimizer has first names alone, as here.

        Example, on all ranks::

            model.under_all_names(model.state_dict())
        """
        modules = IdentityMap.of(self.module).modules
        return repeat_keys(state_dict, {first: others for first, *others in modules if others})

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """TorchRec's, which loads the state of a module also from under several names."""
        optimizers = super().fused_optimizer.optimizers
        if self._named_optimizer is None or self._named_optimizer.optimizers != optimizers:
            self._named_optimizer = _FusedOptimizer(optimizers, self.module, self._env.process_group)
        return self._named_optimizer

    def load_state_dict(self, state_dict: Mapping[str, Any], prefix: str = "", strict: bool = True) -> Any:
        """Loads what ``state_dict()`` of this or of TorchRec's DistributedModelParallel returned.

        A module may come under any of its names, or under several, if the tensors are equal. All ranks must call it.
        Returns the missing and the unexpected keys, each once, by first names.

        Raises:
            CheckpointError: keys are missing or unexpected (strict), names of one module have other tensors on any
                rank, or a shape is wrong. The model is left as it was.
        """
        given = merge_repeated_keys(
            {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)},
            _second_names(self.module),
            group=self._env.process_group,
        )
        expected = self.state_dict(keep_vars=True)
        missing = [key for key in expected if key not in given]
        unexpected = [key for key in given if key not in expected]
        if strict and (missing or unexpected):
            raise CheckpointError(keys_message(missing, unexpected, expected))
        check_shapes(given, expected)
        with one_name_each(self.module, _is_sharded):
            result = super().load_state_dict(given, strict=strict)
        return result._replace(
            missing_keys=[prefix + key for key in missing], unexpected_keys=[prefix + key for key in unexpected]
        )


def _second_names(model: nn.Module) -> dict[str, str]:
    return {alias.fqn: alias.canonical for alias in find_aliases(model, _is_sharded)}


class _FusedOptimizer(CombinedOptimizer):  # type: ignore[misc]
    """Loads the state of a module also from under several names."""

    def __init__(
        self, optimizers: list[tuple[str, KeyedOptimizer]], model: nn.Module, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(optimizers)
        self._canonical, self._group = _second_names(model), group

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self._canonical:
            state_dict = {
                **state_dict,
                "state": merge_repeated_keys(state_dict["state"], self._canonical, group=self._group),
                "param_groups": merge_repeated_groups(state_dict.get("param_groups", ()), self._canonical),
            }
        super().load_state_dict(state_dict)


@contextmanager
def _as_it_was_on_error(model: nn.Module) -> Iterator[None]:
    """Gives every module its children back if the block raises."""
    children = {module: dict(module._modules) for _, module in walk_modules(model, is_leaf=_is_sharded)}
    try:
        yield
    except BaseException:
        for module, modules in children.items():
            module._modules.clear()
            module._modules.update(modules)
        raise

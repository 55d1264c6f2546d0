from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torchtitan.experiments.graph_trainer import passes as titan
from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig
from torchtitan.models.common.attention import FlexAttention

from graphpasses.integrations.torchtitan.their_passes import inductor_passes, name_of


def attention(x: torch.Tensor) -> torch.Tensor:
    return flex_attention(x, x, x)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("ours", [True, False])
def test_flex_attention_is_compiled_with_the_settings_of_the_process(
    ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    compile_region = torch._inductor.standalone_compile

    def compiled(*arguments: Any, **options: Any) -> Any:
        seen.append(config.get_serializable_config_copy())
        return compile_region(*arguments, **options)

    monkeypatch.setattr(torch._inductor, "standalone_compile", compiled)
    query = torch.randn(1, 1, 16, 16)
    traced = make_fx(attention, tracing_mode="fake")(query)
    make_passes = inductor_passes if ours else titan.final_inductor_compile_passes
    before = config.get_serializable_config_copy()
    with config.patch({"eager_numerics.division_rounding": False}):
        for each in make_passes(GraphTrainerCompileConfig(enable=True)):
            traced = each(traced, (query,))
        after = config.get_serializable_config_copy()
    (inside,) = seen
    changed = {
        name for name, value in before.items() if inside[name] != value
    } - FlexAttention.inductor_configs.keys()
    assert changed == (set() if ours else {"eager_numerics.division_rounding"})
    assert (after == before) == ours
    torch.testing.assert_close(traced(query), F.scaled_dot_product_attention(query, query, query))


def test_the_pass_keeps_its_name() -> None:
    passes = GraphTrainerCompileConfig(enable=True)
    assert [*map(name_of, inductor_passes(passes))] == [*map(name_of, titan.final_inductor_compile_passes(passes))]

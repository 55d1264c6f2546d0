"""A random training loop: the source of one that does all it can between its steps, of the lines of ``loops.txt``."""

from __future__ import annotations

import random

from experiments.random_programs.program import FOLDER, inside, lines_of, read_tables

TABLES = read_tables("loops.txt")
_WHEN = ("if i == 2:", "if i == 3:", "if i % 2:", "if i > 1:", "if i == 4:", "")
_OTHERS = ("teacher", "ema", "disc")
_RECORDED = (*_OTHERS, "model", "opt", "opt_2", "sched", "scaler", "saved", "held", "total", "step", "b")


class Loop:
    """Makes a loop of a seed.

    Args:
        seed: decides all.
    """

    breaks = 0.0

    def __init__(self, seed: int) -> None:
        self._random, self._seed = random.Random(f"{seed} loop"), seed
        self.is_compiled = seed % 4 == 0  # too

    def source(self) -> str:
        """Returns the loop, as Python; it may not run eagerly yet."""
        losses = {"loss_fn": self._one("loss"), "loss_fn_2": self._one("loss")}
        run = [f"torch.manual_seed({self._seed})", f"wrap = {self._one('wrap')}", *self._setup()]
        ending = self._random.choice(["", "", "", ", opt", ", opt", ", (opt, opt_2)"])
        ending += f", clip_norm={self._random.choice([0.1, 1e9])}" if ending and self._random.random() < 0.5 else ""
        ending += self._random.choice(["", "", "", ", check_every=2"])
        run += [f"step = c.step(loss_fn, model{ending}{_others(losses['loss_fn'])})"]
        run += [f"step_2 = c.step(loss_fn_2, model{_others(losses['loss_fn_2'])})"]
        run += ["# What may go", "for i in range(7):", *inside(self._body("opt" in ending))]
        # What a step leaves behind in FSDP2's groups shows in eager's next.
        run += ["if c.num_ranks > 1:", "    model.set_requires_gradient_sync(True)"]
        run += ["loss = step.eager(b)", "c.record(loss=loss_of(loss), model=model)"]
        net = [f"s.blocks = nn.ModuleList([{self._one('blocks')}, {self._one('blocks')}])"]
        head = [f"# Seed {self._seed}", "class Model(Net):", "    def __init__(s):", "        super().__init__()"]
        head += inside(inside(net))
        for name, statements in losses.items():
            head += [f"def {name}(model, b):", *inside(["x, y = unpack(b)", *lines_of(statements)])]
        head += ["def run(c):", "    global teacher, ema, disc, scaler, gen", *inside(run)]
        return (FOLDER / "prelude.txt").read_text() + "\n".join(head) + "\n"

    def _setup(self) -> list[str]:
        averages = ["", ", use_buffers=True", ", multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)"]
        lines = ["model, disc = Model(), Disc()", "teacher = copy.deepcopy(model).eval().requires_grad_(False)"]
        lines += [f"ema = swa_utils.AveragedModel(model{self._random.choice(averages)}).requires_grad_(False)"]
        lines += [*(self._one("setup") for _ in range(self._random.choice([0, 0, 1]))), "if c.num_ranks > 1:"]
        groups = [each for each in TABLES["sharding"] if self._random.random() < 0.4]
        policy = f"mesh={self._one('mesh')}, {self._one('policy')}"
        lines += inside([each.replace("{o}", policy) for each in (*groups, "fully_shard(model, {o})")])
        lines += ["scaler, gen = torch.amp.GradScaler('cpu', init_scale=4.0), torch.Generator().manual_seed(1)"]
        lines += ["scaler.scale(torch.ones(()))", "total, held, rng = torch.zeros(()), [], torch.get_rng_state()"]
        optimizer = self._one("optimizer").replace("{p}", self._one("group"))
        lines += [f"make_optimizer = lambda: {optimizer}", f"make_schedule = lambda opt: {self._one('schedule')}"]
        lines += ["opt = make_optimizer()", "given = {p for group in opt.param_groups for p in group['params']}"]
        lines += ["rest = [p for p in model.parameters() if p not in given]"]
        lines += ["opt_2 = optim.AdamW([*rest, *disc.parameters()], lr=0.01)", "sched = make_schedule(opt)"]
        return [*lines, "saved = copy.deepcopy([model.state_dict(), opt.state_dict()])"]

    def _body(self, is_inside: bool) -> list[str]:
        num = self._random.randrange(2, 6)
        num_before = self._random.randrange(1, num + 1)
        before = [self._one("before") for _ in range(num_before)]
        sharded = [self._one("sharded") for _ in range(self._random.choice([0, 1, 2, 3]))]
        lines = ["x, y = c.floats(i), c.integers(i)", "b = wrap(x, y)", *self._timed(before)]
        lines += ["if c.num_ranks > 1:", *inside(self._timed(sharded))] if sharded else []
        lines += ["loss = step(b)"] if self._random.random() < 0.6 else lines_of(self._one("micro"))
        lines += self._timed([self._one("after") for _ in range(num - num_before)])
        lines += ["sched.step()"] if is_inside else [*lines_of(self._one("step")), *lines_of(self._one("zero"))]
        objects = ", ".join(f"{each}={each}" for each in _RECORDED)
        return [*lines, f"c.record(loss=loss_of(loss), result=loss, {objects})"]

    def _one(self, table: str) -> str:
        pick = self._random.choice
        given = {"{f}": pick(["0.5", "2.0", "0.0", "1.5"]), "{k}": pick("01234567"), "{b}": pick(["True", "False"])}
        given |= {"{M}": pick(["model.blocks[0]", "model.blocks[1]", "model.head", "model.norm", "model.emb"])}
        statement = pick(TABLES[table])
        for name, value in given.items():
            statement = statement.replace(name, value)
        return statement

    def _timed(self, statements: list[str]) -> list[str]:
        lines = []
        for each in statements:
            when = self._random.choice(_WHEN)
            lines += [when, *inside(lines_of(each))] if when else lines_of(each)
        return lines


def _others(statements: str) -> str:
    others = [each for each in _OTHERS if f"{each}(" in statements]
    return f", others=({''.join(f'{each}, ' for each in others)})" if others else ""

"""A random training program: the source of a model, a loss and a loop, made of the lines of ``statements.txt``."""

from __future__ import annotations

import random
from pathlib import Path

FOLDER = Path(__file__).parent


def read_tables(name: str) -> dict[str, list[str]]:
    """Returns the statements of a file, by table."""
    return {
        part.partition("]")[0]: [each for line in part.splitlines()[1:] for each in line.split(" | ") if each]
        for part in (FOLDER / name).read_text().split("\n[")[1:]
    }


TABLES = read_tables("statements.txt")
VALUES = [
    [part.split(" / ") for part in line.split(" | ")]
    for line in (FOLDER / "statements.txt").read_text().partition("[values]\n")[2].splitlines()
]
_WHEN = ("if i == 2:", "if i == 3:", "if i % 2:", "if i > 1:", "")


class Program:
    """Makes a program of a seed.

    Args:
        seed: decides all.
    """

    def __init__(self, seed: int) -> None:
        self._random, self._seed = random.Random(seed), seed
        self._values = self._random.sample(VALUES, self._random.choice([0, 0, 1, 2]))
        weights = {"inplace": (0, 2, 6), "pure": (5,), "random": (0, 1, 3), "control": (0, 0, 2), "autograd": (0, 3)}
        weights |= {"parameters": (5,), "buffers": (0, 1, 4), "rows": (0, 0, 4), "places": (0, 0, 5)}
        self._weights = {name: self._random.choice(each) for name, each in weights.items()}

    sets: tuple[str, ...] = ()  # what the loop sets before each step
    breaks = 0.0  # how often the graph that Dynamo makes of a forward is broken behind a statement

    @property
    def is_compiled(self) -> bool:
        """Whether it is compiled, too: Dynamo does not guard all Python values, as the limits say."""
        return not self._values

    def source(self) -> str:
        """Returns the program, as Python; it may not run eagerly yet."""
        few = self._random.choice([0, 0, 1, 2])
        loss = ["out = model(x)", f"loss = {self._one('objective')}", *(self._one("loss") for _ in range(few))]
        if self._weights["places"]:
            kept = self._fill(self._random.choice(TABLES["places"]), a="out", b="out", o="out", w="s.w0", B="s.buf")
            loss[1:1] = ["s = model", *lines_of(kept)]
        loss += [f"loss = loss * ({self._fill(self._random.choice(reads))})" for _, reads, _ in self._values]
        before = [self._one("before") for _ in range(self._random.randrange(3))]
        before += [self._fill(self._random.choice(writes)) for _, _, writes in self._values]
        is_inside = self._random.random() < 0.3
        after = [self._one("after") for _ in range(self._random.randrange(4))]
        end = [] if is_inside else ["opt.step()"]
        loop = [
            "x, y = c.floats(i), c.integers(i)",
            *self.sets,
            *self._timed(before),
            "loss = step(x, y, k)",
            *self._timed(after),
        ]
        loop += [
            *end,
            "c.record(loss=loss, model=model, opt=opt, held=held, x=x, places=[GD, GL, vars(GO)])",
            *([] if is_inside else [self._one("zero")]),
        ]
        setup = [self._one("setup") for _ in range(self._random.choice([0, 0, 0, 1, 2]))]
        optimizer = self._one("optimizer").replace("{p}", self._one("group"))
        run = [f"torch.manual_seed({self._seed})", "model = Model()", *setup]
        run += ["if c.num_ranks > 1:", *inside(self._sharding()), f"opt = {optimizer}"]
        run += ["held, total, k, rng = [], torch.zeros(()), 1.0, torch.get_rng_state()"]
        run += [f"step = c.step(loss_fn, model, {'opt' if is_inside else None})", "for i in range(5):", *inside(loop)]
        blocks = [self._module("Block", 4), self._module("Model", self._random.randrange(3, 10))]
        functions = [
            "def loss_fn(model, x, y, k):",
            *inside([*loss, "return loss.mean()"]),
            "def run(c):",
            *inside(run),
        ]
        head = [f"# Seed {self._seed}", "GD, GL, GO = {}, [], Pair(a=None, b=None, n=None)"]
        head += [definition for (definition,), _, _ in self._values]
        return (FOLDER / "prelude.txt").read_text() + "\n".join([*head, *blocks[0], *blocks[1], *functions]) + "\n"

    def _sharding(self) -> list[str]:
        """Returns how FSDP2 shards the model; what else a seed decides does not depend on it."""
        pick = random.Random(f"{self._seed} sharding").choice
        options = pick(TABLES["policy"])
        lines = [each for each in TABLES["groups"] if pick([False, True])]
        return [each.replace("{o}", options) for each in (*lines, "fully_shard(model, {o})")]

    def _module(self, name: str, num_statements: int) -> list[str]:
        kinds = [each for each in TABLES["modules"] if name == "Model" or "()" not in each]
        tied = self._random.random() < 0.3
        init = ["super().__init__()", "s.w0 = nn.Parameter(torch.randn(8, 8) / 3)"]
        init += ["s.w1 = s.w0" if tied else "s.w1 = nn.Parameter(torch.randn(8, 8) / 3)"]
        init += ["s.v0, s.v1 = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))"]
        init += ["s.unused = nn.Parameter(torch.ones(2))", "s.num, s.rate, s.aux = 1.0, 0.1, None"]
        init += ["s.kd, s.kl, s.ko = {}, [], Pair(a=None, b=None, n=None)"]
        init += [
            "s.register_buffer('buf', torch.zeros(8))",
            "s.register_buffer('hid', torch.ones(8), persistent=False)",
            "s.register_buffer('scale', torch.ones(8, requires_grad=True))",
        ]
        init += ["s.register_buffer('cnt', torch.zeros((), dtype=torch.long))"]
        init += [f"s.m0 = {self._random.choice([each for each in kinds if each != 's.m0'])}"]
        init += [f"s.m{index} = {self._random.choice(kinds)}" for index in (1, 2)]
        init += ["s.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))"]
        start = self._random.choice(["h = x", "h = x * 1.0", "h = F.linear(x, s.w0, s.v0)"])
        live, body = ["h"], [start]
        for index in range(num_statements):
            (table,) = self._random.choices([*self._weights], [*self._weights.values()])
            statement, made = self._random.choice(TABLES[table]), f"h{index}"
            a, b = (self._random.choice(live[-3:]) for _ in range(2))
            body += lines_of(self._fill(statement, a=a, b=b, o=made))
            if self.breaks and self._random.random() < self.breaks:
                body.append("torch._dynamo.graph_break()")
            live += [made] if "{o}" in statement else []
        # Whatever else was drawn, there is something to train.
        body.append(f"return {live[-1]}" + (" + F.linear(x, s.w1)" if name == "Model" else ""))
        methods = ["def __init__(s):", *inside(init), "def forward(s, x):", *inside(body)]
        return [f"class {name}(nn.Module):", *inside(methods)]

    def _fill(self, statement: str, **names: str) -> str:
        pick = self._random.choice
        given = {
            "k": pick("01234567"),
            "f": pick(["0.5", "2.0", "-1.0", "1.5"]),
            "d": pick("01"),
            "m": pick(["s.m0", "s.m1"]),
        }
        given |= {"w": pick(["s.w0", "s.w1"]), "v": pick(["s.v0", "s.v1"]), "B": pick(["s.buf", "s.hid"]), "p": "{p}"}
        given |= {"D": pick(["s.kd", "GD"]), "L": pick(["s.kl", "GL"]), "O": pick(["s.ko", "GO"])}
        return statement.format_map(given | names)

    def _one(self, table: str) -> str:
        statement = self._random.choice(TABLES[table])
        return statement if table == "group" else self._fill(statement)

    def _timed(self, statements: list[str]) -> list[str]:
        lines = []
        for each in statements:
            when = "" if each.startswith(("if ", "for ", "with ")) else self._random.choice(_WHEN)
            lines += [when, *inside(lines_of(each))] if when else lines_of(each)
        return lines


class BrokenProgram(Program):
    """A program that is compiled alone, whose forwards break Dynamo's graphs and have views across the breaks.

    Args:
        seed: decides all.
    """

    breaks = 0.4

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._values = []
        self._weights = {**dict.fromkeys(self._weights, 0), "pure": 5, "parameters": 5, "inplace": 2, "views": 8}


class RowsProgram(Program):
    """A program that computes with as many rows as values of its batch, or of its activations, give: none to all.

    Args:
        seed: decides all.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._values = []
        self._weights = {**dict.fromkeys(self._weights, 0), "pure": 2, "parameters": 2, "rows": 2, "cuts": 8}

    is_compiled = False  # Dynamo breaks its graphs there


class AnnealedProgram(Program):
    """A program that gives functions of torch a number which its loop changes before each step.

    Args:
        seed: decides all.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._values = []
        self._weights = {**dict.fromkeys(self._weights, 0), "pure": 2, "parameters": 2, "autograd": 1, "annealed": 8}
        rates = [round(self._random.uniform(0.05, 0.95), 3) for _ in range(5)]
        self.sets = ("for m in model.modules():", f"    m.rate = {rates}[i]")

    is_compiled = False  # Dynamo compiles for each number

    def _fill(self, statement: str, **names: str) -> str:
        numbers = ("s.rate", "1 - s.rate", "s.rate / 2", "s.rate ** 2", "1 / (1 + s.rate)", "math.exp(-s.rate)")
        return super()._fill(statement, q=self._random.choice(numbers), **names)


def lines_of(statement: str) -> list[str]:
    statement = statement.replace("BREAK", "torch._dynamo.graph_break()")
    lines = [line for block in statement.split(" ;; ") for line in block.split(" ; ")]
    return [f"    {line[2:]}" if line.startswith("> ") else line for line in lines]


def inside(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]

"""torchtitan's trainers on a CPU: for tests, and to try out without a GPU.

::

    torchrun --nproc-per-node 4 -m graphpasses.commands.train_torchtitan_on_cpu --module graph_trainer.llama3 \\
        --config graph_trainer_llama3_debugmodel_sdpa_cross_entropy_loss --compile.pass_pipeline graphpasses …

Process groups are ``nccl_sim``'s, which add as NCCL's rings do and know FSDP2's reductions. A tokenizer and a data
set are made in the folder ``tests/assets``, where torchtitan's debug configurations look for them, if they are
missing.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
from pathlib import Path

from graphpasses._torch.cpu_as_accelerator import use_cpu_as_accelerator
from graphpasses._torchtitan import save_cpu_attention


def use_cpu(backend: str = "nccl_sim") -> None:
    """Makes torchtitan take the CPU for its accelerator in this process; call it before torchtitan is imported.

    The backend ``"gloo"`` is faster than ``"nccl_sim"``, but knows neither the order of NCCL's rings nor the
    reduction that torchtitan asks FSDP2 for, PREMUL_SUM.
    """
    import graphpasses.simulate  # noqa: F401  registers nccl_sim

    use_cpu_as_accelerator(backend)
    save_cpu_attention()


def make_assets(folder: Path) -> None:
    """Writes a small tokenizer and a text data set, always the same, to ``tests/assets`` in a folder without them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    data, tokenizer = (folder / "tests" / "assets" / name for name in ("c4_test", "tokenizer"))
    if data.exists() and tokenizer.exists():
        return
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(800)]
    texts = [" ".join(rng.choices(words, k=300)) + "." for _ in range(400)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    first, last = "<|begin_of_text|>", "<|end_of_text|>"
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=[first, last], show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    kinds = {"bos_token": first, "eos_token": last, "tokenizer_class": "PreTrainedTokenizerFast"}
    _publish(data, {"data.json": "".join(json.dumps({"text": text}) + "\n" for text in texts)})
    _publish(tokenizer, {"tokenizer.json": bpe.to_str(), "tokenizer_config.json": json.dumps(kinds)})


def _publish(folder: Path, files: dict[str, str]) -> None:
    """Writes a folder at once: all ranks may do so, and none sees a part of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        whole = Path(temporary) / folder.name
        whole.mkdir()
        for name, text in files.items():
            (whole / name).write_text(text)
        with contextlib.suppress(OSError):  # another rank was first
            whole.rename(folder)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder; train_torchtitan_on_cpu puts its data there")


def main() -> None:
    """Runs ``torchtitan.train`` on the CPU, with the pipeline ``graphpasses`` registered."""
    make_assets(Path())
    use_cpu()
    from graphpasses.commands import train_torchtitan

    train_torchtitan.main()


if __name__ == "__main__":
    main()

"""How fast the training loop is beside others: `python benchmarks/train_speed.py [--quick] [--case NAME]`.

The same model, tokens, optimizer and torch for torchtitan, LitGPT, the Hugging Face Trainer and our `train.py`, each a
fresh process. A round runs every contender of a case once, and the order turns round after round, so that a machine
which others use slows all alike. A process's speed is that of its median step after the warm-up; two contenders are
compared by the median, over the rounds, of the ratio within a round, with a bootstrap interval of 95 %.

`--side-by-side` compares the contenders of one rank in pairs that run at the same time, each on a core of its own with
one thread, and change cores round after round: what others do to the machine in that time, they do to both.

Without a GPU a model of 6 million parameters trains in float32. With GPUs, Llama 1B and 8B train in bfloat16, compiled,
with a chunked loss and selective checkpointing, on all GPUs of the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from peers import ours
from peers.environment import python_of_peers
from peers.workload import Model, Workload

from chimera_sm.catalog import instances
from chimera_train.config import ModelConfig
from chimera_train.config.flops import flops_per_token, num_parameters

PEERS = Path(__file__).parent / "peers"
DRIVERS = {"torchtitan": "torchtitan_cpu.py", "LitGPT": "litgpt_train.py", "HF Trainer": "hf_trainer.py"}
OURS = "ours"
TIMEOUT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Contender:
    framework: str
    compile: bool = False
    save_memory: bool = False

    @property
    def label(self) -> str:
        extras = (", compiled" if self.compile else "") + (", saving memory" if self.save_memory else "")
        return self.framework + extras


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    ranks: int
    threads: int
    workload: Workload
    contenders: tuple[Contender, ...]
    """The first is compared with each other."""
    targets: dict[str, float]
    """Least ratio of the first contender's speed to that of the one with this label."""
    core: int | None = None
    """The one that its processes stay on; None: any."""


@dataclass(frozen=True)
class Speed:
    tokens_per_s: float
    """Of the whole job."""
    peak_memory_gib: float | None
    """Reserved by torch's allocator on the first GPU; None on a CPU."""
    loss: float
    num_parameters: int
    torch: str


DEBUG = Model(
    # torchtitan's debug model.
    name="debug",
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=768,
    num_layers=6,
    num_heads=16,
    num_kv_heads=16,
    tie_embeddings=False,
)
LLAMA_1B = Model(
    name="llama3_1b",
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    tie_embeddings=True,
)
LLAMA_8B = Model(
    name="llama3_8b",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    tie_embeddings=False,
)


def config_of(workload: Workload) -> ModelConfig:
    return ModelConfig(**asdict(workload.model), max_position_embeddings=workload.sequence_length)


def cpu_cases(tokens: Path, num_steps: int) -> list[Case]:
    workload = Workload(
        model=DEBUG,
        tokens=str(tokens),
        token_dtype=ours.TOKEN_DTYPE,
        micro_batch_size=4,
        sequence_length=512,
        num_steps=num_steps,
        compile=False,
        save_memory=False,
        param_dtype="float32",
    )
    plain, titan = Contender(framework=OURS), Contender(framework="torchtitan")
    compiled = Contender(framework=OURS, compile=True)
    saving = Contender(framework=OURS, save_memory=True)
    return [
        Case(
            name="1-rank",
            ranks=1,
            threads=2,
            workload=workload,
            contenders=(plain, titan, Contender(framework="LitGPT"), Contender(framework="HF Trainer")),
            targets={"torchtitan": 0.95, "LitGPT": 1.0, "HF Trainer": 1.1},
        ),
        Case(
            name="2-ranks-fsdp",
            ranks=2,
            threads=1,
            workload=workload,
            contenders=(plain, titan),
            targets={"torchtitan": 1.3},
        ),
        Case(
            name="saving-memory",
            ranks=1,
            threads=2,
            workload=workload,
            contenders=(saving, plain, Contender(framework="torchtitan", save_memory=True)),
            targets={plain.label: 0.5},
        ),
        Case(
            name="compiled",
            ranks=1,
            threads=2,
            workload=workload,
            contenders=(
                compiled,
                plain,
                *(Contender(framework=name, compile=True) for name in ("torchtitan", "HF Trainer")),
            ),
            targets={plain.label: 1.0},
        ),
    ]


def gpu_cases(tokens: Path, num_steps: int) -> list[Case]:
    options = {"compile": True, "save_memory": True}
    cases = []
    for model, sequence_length, micro_batch_size in (
        (LLAMA_1B, 4096, 4),
        (LLAMA_1B, 8192, 2),
        (LLAMA_8B, 4096, 2),
        (LLAMA_8B, 8192, 1),
    ):
        workload = Workload(
            model=model,
            tokens=str(tokens),
            token_dtype=ours.TOKEN_DTYPE,
            micro_batch_size=micro_batch_size,
            sequence_length=sequence_length,
            num_steps=num_steps,
            param_dtype="bfloat16",
            **options,
        )
        mine, titan = Contender(framework=OURS, **options), Contender(framework="torchtitan", **options)
        cases.append(
            Case(
                name=f"{model.name}-{sequence_length}",
                ranks=torch.cuda.device_count(),
                threads=max(1, (os.cpu_count() or 1) // torch.cuda.device_count()),
                workload=workload,
                contenders=(mine, titan),
                targets={titan.label: 1.0},
            )
        )
    return cases


def measure(case: Case, contender: Contender, corpus: Path, warmup_steps: int, core: int | None = None) -> Speed:
    """One fresh run, on `core` alone if given; raises RuntimeError with the end of its output if it fails."""
    if core is not None:
        case = replace(case, core=core, threads=1)
    workload = replace(case.workload, compile=contender.compile, save_memory=contender.save_memory)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if contender.framework == OURS:
            found = _run_ours(workload, case, folder, corpus)
        else:
            found = _run_peer(contender.framework, workload, case, folder)
    ends_s = found["ends_s"][warmup_steps:]
    step_s = statistics.median(after - before for before, after in itertools.pairwise(ends_s))
    tokens = workload.micro_batch_size * workload.sequence_length * case.ranks
    return Speed(
        tokens / step_s, found["peak_memory_gib"], found["losses"][-1], found["num_parameters"], found["torch"]
    )


def _run_ours(workload: Workload, case: Case, folder: Path, corpus: Path) -> dict:
    channel = folder / "input" / "data" / "train"
    channel.parent.mkdir(parents=True)
    channel.symlink_to(corpus)
    recipe = folder / "recipe.json"
    ours.write_recipe(workload, recipe, world_size=case.ranks)
    processes = _start([sys.executable, "-u", str(ours.TRAIN)], case, folder, recipe=recipe)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while len(rows := ours.read_metrics(folder)) < workload.num_steps:
            if any(process.poll() is not None for process in processes) or time.monotonic() > deadline:
                raise RuntimeError(_failure(OURS, processes, folder))
            time.sleep(0.2)
    finally:
        _end(processes)
    return {
        "ends_s": [row["time"] for row in rows],
        "losses": [row["loss"] for row in rows],
        "num_parameters": num_parameters(config_of(workload)),
        "peak_memory_gib": max(row["mem_gib"] for row in rows) if torch.cuda.is_available() else None,
        "torch": torch.__version__,
    }


def _run_peer(framework: str, workload: Workload, case: Case, folder: Path) -> dict:
    given, result = folder / "workload.json", folder / "result.json"
    given.write_text(json.dumps(asdict(workload)))
    command = [str(python_of_peers()), str(PEERS / DRIVERS[framework]), str(given), str(result)]
    processes = _start(command, case, folder, always_ranked=framework == "torchtitan")
    try:
        deadline = time.monotonic() + TIMEOUT_S
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [-1]
    finally:
        _end(processes)
    if any(codes):
        raise RuntimeError(_failure(framework, processes, folder))
    return json.loads(result.read_text())


def _start(
    command: list[str], case: Case, folder: Path, *, recipe: Path | None = None, always_ranked: bool = False
) -> list[subprocess.Popen]:
    """One process a rank, each with its output in a file."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for rank in range(case.ranks):
        environment = {**os.environ, "OMP_NUM_THREADS": str(case.threads), "HF_HUB_OFFLINE": "1"}
        if case.ranks > 1 or always_ranked:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment |= {"WORLD_SIZE": str(case.ranks), "LOCAL_WORLD_SIZE": str(case.ranks)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if recipe is not None:
            environment |= {"CHIMERA_ML_ROOT": str(folder), "CHIMERA_RECIPE": str(recipe)}
        placed = command if case.core is None else ["taskset", "--cpu-list", str(case.core), *command]
        with (folder / f"output-{rank}").open("wb") as output:
            processes.append(
                subprocess.Popen(placed, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
            )
    return processes


def _end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def _failure(framework: str, processes: list[subprocess.Popen], folder: Path) -> str:
    ends = [(folder / f"output-{rank}").read_text()[-3000:] for rank in range(len(processes))]
    return f"{framework} ended with {[process.poll() for process in processes]}:\n" + "\n".join(ends)


def bootstrap(ratios: list[float], *, draws: int = 5000) -> tuple[float, float]:
    """95 % interval of the median over rounds."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def run_case(case: Case, corpus: Path, *, rounds: int, warmup_steps: int, side_by_side: bool = False) -> dict:
    speeds: dict[str, list[Speed]] = {contender.label: [] for contender in case.contenders}
    if side_by_side:
        return _run_pairs(case, corpus, rounds=rounds, warmup_steps=warmup_steps)
    for number in range(rounds):
        order = case.contenders if number % 2 == 0 else case.contenders[::-1]
        for contender in order:
            speed = measure(case, contender, corpus, warmup_steps)
            speeds[contender.label].append(speed)
            text = f"{case.name}, round {number + 1} of {rounds}: {contender.label}, {speed.tokens_per_s:,.0f} tokens/s"
            print(text, file=sys.stderr, flush=True)
    first, *others = speeds
    pairs = {other: list(zip(speeds[first], speeds[other], strict=True)) for other in others}
    return _result(case, speeds, pairs)


def _run_pairs(case: Case, corpus: Path, *, rounds: int, warmup_steps: int) -> dict:
    """The first contender against each other one, both at the same time."""
    speeds: dict[str, list[Speed]] = {contender.label: [] for contender in case.contenders}
    pairs: dict[str, list[tuple[Speed, Speed]]] = {contender.label: [] for contender in case.contenders[1:]}
    first = case.contenders[0]
    with ThreadPoolExecutor(2) as pool:
        for number, other in itertools.product(range(rounds), case.contenders[1:]):
            runs = [
                pool.submit(measure, case, contender, corpus, warmup_steps, core=(index + number) % 2)
                for index, contender in enumerate((first, other))
            ]
            mine, theirs = (run.result() for run in runs)
            pairs[other.label].append((mine, theirs))
            speeds[first.label].append(mine)
            speeds[other.label].append(theirs)
            text = f"{mine.tokens_per_s:,.0f} against {theirs.tokens_per_s:,.0f} tokens/s of {other.label}"
            print(f"{case.name}, round {number + 1} of {rounds}: {text}", file=sys.stderr, flush=True)
    return _result(replace(case, threads=1), speeds, pairs)


def _result(case: Case, speeds: dict[str, list[Speed]], pairs: dict[str, list[tuple[Speed, Speed]]]) -> dict:
    counts = {label: found[0].num_parameters for label, found in speeds.items()}
    assert len(set(counts.values())) == 1, f"not the same model: {counts}"
    first = case.contenders[0].label
    comparisons = []
    for other, found in pairs.items():
        ratios = [mine.tokens_per_s / theirs.tokens_per_s for mine, theirs in found]
        low, high = bootstrap(ratios)
        comparisons.append(
            {
                "of": first,
                "to": other,
                "ratio": statistics.median(ratios),
                "interval": [low, high],
                "at_least": case.targets.get(other),
            }
        )
    return {
        "case": case.name,
        "ranks": case.ranks,
        "threads": case.threads,
        "workload": asdict(case.workload),
        "speeds": {label: [asdict(speed) for speed in found] for label, found in speeds.items()},
        "comparisons": comparisons,
    }


def print_case(result: dict, peak_tflops: float | None) -> None:
    workload = Workload(**{**result["workload"], "model": Model(**result["workload"]["model"])})
    batch = f"{workload.micro_batch_size} x {workload.sequence_length} tokens a rank, {workload.param_dtype}"
    parameters = num_parameters(config_of(workload)) / 1e6
    print(f"\n{result['case']}: {parameters:,.1f} M parameters, {result['ranks']} ranks, {batch}")
    print(f"  {'':<34} {'tokens/s':>9} {'min':>9} {'max':>9} {'MFU':>6} {'GiB':>6} {'loss':>6}")
    flops = flops_per_token(config_of(workload), workload.sequence_length)
    for label, found in result["speeds"].items():
        rates = [speed["tokens_per_s"] for speed in found]
        median = statistics.median(rates)
        mfu = f"{median * flops / (result['ranks'] * peak_tflops * 1e12):.1%}" if peak_tflops else "-"
        memory = found[0]["peak_memory_gib"]
        gib = "-" if memory is None else f"{memory:.1f}"
        loss = f"{found[-1]['loss']:.2f}"
        print(f"  {label:<34} {median:>9,.0f} {min(rates):>9,.0f} {max(rates):>9,.0f} {mfu:>6} {gib:>6} {loss:>6}")
        other = found[0]["torch"]
        if other != torch.__version__:
            print(f"    with torch {other}, ours with {torch.__version__}")
    for comparison in result["comparisons"]:
        low, high = comparison["interval"]
        target = comparison["at_least"]
        verdict = ""
        if target is not None:
            verdict = "met" if low >= target else "missed" if high < target else "within the noise"
            verdict = f"  wanted {target:.2f}: {verdict}"
        text = f"{comparison['of']} / {comparison['to']}"
        print(f"  {text:<50} {comparison['ratio']:>5.2f} [{low:.2f}, {high:.2f}]{verdict}")


def gpu_peak_tflops() -> float | None:
    """Dense bf16 peak of this machine's GPU, out of the catalogue; None where it is not in there."""
    if not torch.cuda.is_available():
        return None
    words = torch.cuda.get_device_name().split()
    known = map(instances.instance, instances.instance_types())
    return next((known_type.bf16_tflops for known_type in known if known_type.accelerator.split()[0] in words), None)


def fits(case: Case) -> bool:
    """Whether weights, gradients and Adam's moments (16 bytes a parameter) leave a tenth of the GPUs free."""
    memory = torch.cuda.get_device_properties(0).total_memory * case.ranks
    return 16 * num_parameters(config_of(case.workload)) < 0.9 * memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two rounds of few steps: a trial, not a measurement")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12, help="measured steps of a process")
    parser.add_argument("--case", action="append", help="one case alone; may be given again")
    parser.add_argument("--side-by-side", action="store_true", help="in pairs, at the same time, a core each")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rounds, steps = (2, 8) if given.quick else (given.rounds, given.steps)
    warmup_steps = 3
    with tempfile.TemporaryDirectory() as name:
        on_gpu = torch.cuda.is_available()
        corpus, model = Path(name, "corpus"), LLAMA_1B if on_gpu else DEBUG
        ids = ours.write_corpus(corpus, vocab_size=model.vocab_size, num_tokens=20_000_000 if on_gpu else 1_000_000)
        cases = (gpu_cases if on_gpu else cpu_cases)(ids, warmup_steps + steps + 1)
        unknown = set(given.case or ()) - {case.name for case in cases}
        if unknown:
            parser.error(f"unknown case {', '.join(unknown)}; there are {', '.join(case.name for case in cases)}")
        results, failed = [], False
        if given.side_by_side:
            if on_gpu or (os.cpu_count() or 1) < 2:
                parser.error("--side-by-side wants two cores and no GPU")
            cases = [case for case in cases if case.ranks == 1]
        for case in cases:
            if given.case and case.name not in given.case:
                continue
            if on_gpu and not fits(case):
                print(f"\n{case.name}: not measured, its state does not fit on {case.ranks} of these GPUs")
                continue
            try:
                results.append(
                    run_case(case, corpus, rounds=rounds, warmup_steps=warmup_steps, side_by_side=given.side_by_side)
                )
            except RuntimeError as error:
                failed = True
                print(f"\n{case.name}: not measured: {error}")
                continue
            print_case(results[-1], gpu_peak_tflops())
            if given.json:  # after each case: the next may take long
                given.json.write_text(json.dumps(results, indent=2) + "\n")
    if not on_gpu:
        print("\n1B and 8B, sequence 4096 and 8192, MFU and peak memory: not measured, this machine has no GPU")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

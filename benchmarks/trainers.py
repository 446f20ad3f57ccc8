"""What does noria cost and keep in people's own trainers?

    step       a step of transformers' Trainer: as it is, with noria and all units resident, and streamed through a
               window of a quarter of the weights. Aim: resident over plain at most 1.01. How long each lane was busy
               tells where the rest goes: on a CPU, copies use the cores and the memory that compute needs.
    adapters   LoRA over a frozen base that streams, in bf16 and, if bitsandbytes is there, in four bits (NF4). The
               fetch lane is limited, so that a forward's fetches last a given part of its time. Speed is the time
               with all units resident by the time with streamed ones. Aim: 0.97 where that part is below 1.
    load       seconds for each GiB of weights: `noria.wrap`, and `load_state_dict` of a wrapped and of a plain model.
    generate   tokens a second of `generate`: plain, and through a window of a quarter of the weights.

    python benchmarks/trainers.py
    python benchmarks/trainers.py --only adapters --layer-ms 0    # layers last as long as they compute

What is compared takes turns, step by step, in one process. A ratio is the median of those of pairs. A layer of
"adapters" lasts at least `--layer-ms` forward and 1.5 times that backward, so that a small or busy machine shows the
schedule. It needs transformers, accelerate and peft; nothing is downloaded.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import _common
import noria
import overlap
import torch
from noria.integrations.transformers import NoriaCallback, NoriaTrainer
from noria.testing import on_machine
from noria.wrapped import wrapped_by
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

GIB = 1 << 30
VOCAB = 1024
WARM_UP = 3
"""Steps that do not count: the passes are known after them."""
PLAIN, RESIDENT, STREAMED = "plain", "resident", "streamed"
SAME_CODE = "resident, torch's AdamW"
FETCH_SHARES = (0.25, 0.5, 0.97, 2.0)
"""How long the fetches of a forward take, as parts of it: up to 1 they could be hidden."""


def llama(layers: int, width: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    return LlamaForCausalLM(config).to(dtype)


def bytes_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def window_of(model: nn.Module) -> int:
    """A quarter of the weights, or what the largest unit needs."""
    largest = max(bytes_of(each) for each in [*model.model.layers, model.lm_head])
    return max(bytes_of(model) // 4, int(2.2 * largest))


def finish(model: nn.Module) -> None:
    """What its threads still do belongs to this turn."""
    if (wrapped := wrapped_by(model)) is not None:
        wrapped.context.engine.idle()


def take_turns(works: dict[str, Callable[[], Any]], rounds: int, warm_up: int = WARM_UP) -> dict[str, list[float]]:
    """Seconds of each work, round by round. None always follows the same one."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for number in range(rounds + warm_up):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            taken = _common.seconds(works[name])
            if number >= warm_up:
                samples[name].append(taken)
    return samples


# ---- step: trainers own their loops, so each has a thread, and a turn lasts from the end of a step to the next ----


class Turns:
    """Lets one thread run at a time, in the order of the rounds."""

    def __init__(self, names: list[str], rounds: int) -> None:
        order = [names[(number + place) % len(names)] for number in range(rounds + 1) for place in range(len(names))]
        self._left = list(reversed(order))
        self._changed = threading.Condition()
        self.error: BaseException | None = None

    def wait_for(self, name: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.error or not self._left or self._left[-1] == name)
            if self.error:
                raise RuntimeError("another trainer failed") from self.error

    def end(self) -> None:
        with self._changed:
            self._left.pop()
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()


class Turn(TrainerCallback):
    def __init__(self, name: str, turns: Turns) -> None:
        self._name, self._turns = name, turns
        self._began = 0.0
        self.seconds: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._turns.wait_for(self._name)
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        finish(more["model"])
        self.seconds.append(time.perf_counter() - self._began)
        self._turns.end()
        self._turns.wait_for(self._name)
        self._began = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._turns.end()


def trainer_steps(args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    layers, width, batch, context = (4, 64, 2, 16) if args.quick else (12, 512, 4, 256)
    steps = args.rounds + WARM_UP
    model = llama(layers, width)
    tokens = torch.randint(2, VOCAB, (batch * steps, context), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    policies = {
        PLAIN: None,
        SAME_CODE: {"device_memory": 1.0, "kernel": "torch"},
        RESIDENT: {"device_memory": 1.0, "resident": "none"},
        STREAMED: {"device_memory": window_of(model), "resident": "none"},
    }
    turns = Turns(list(policies), steps)
    taken: dict[str, Turn] = {}
    seconds: dict[str, list[float]] = {}
    losses: dict[str, float] = {}
    fetches: dict[str, int] = {}
    busy_s: dict[str, dict[str, float]] = {}

    def build(name: str, arguments: TrainingArguments) -> Trainer:
        policy, turn = policies[name], Turn(name, turns)
        given = {"model": copy.deepcopy(model), "args": arguments, "train_dataset": data, "callbacks": [turn]}
        trainer = Trainer(**given) if policy is None else NoriaTrainer(**given, noria=policy)
        trainer.remove_callback(NoriaCallback)  # it prints the report
        taken[name] = turn
        return trainer

    def run(name: str, trainer: Trainer) -> None:
        try:
            losses[name] = trainer.train().training_loss
            seconds[name] = taken[name].seconds[WARM_UP:]
            if policies[name] is not None:
                report = noria.report(trainer.model, write_trace=False)
                fetches[name] = report.num_fetches
                busy_s[name] = {each.lane: each.busy_us / 1e6 / report.num_steps for each in report.lanes}
        except BaseException as error:
            turns.fail(error)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
        )
        trainers = {name: build(name, arguments) for name in policies}  # one after another: they share what they set up
        threads = [threading.Thread(target=run, args=each) for each in trainers.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if turns.error:
        raise turns.error
    summary = {
        "step_s": {name: _common.spread(each) for name, each in seconds.items()},
        "over_plain": {name: _common.paired_ratio(each, seconds[PLAIN]) for name, each in seconds.items()},
        "same_losses_to_the_bit": losses[SAME_CODE] == losses[PLAIN] and losses[RESIDENT] == losses[STREAMED],
        "losses": losses,
        "fetches": fetches,
        "busy_s_a_step": busy_s,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_a_step": batch * context,
    }
    return seconds, summary


# ---- adapters ----


def pace(model: nn.Module, layer_s: float) -> None:
    """Makes each layer last at least `layer_s` forward, and 1.5 times that backward."""
    for layer in model.get_base_model().model.layers:
        forward, clock = layer.forward, {}

        def slow(x: torch.Tensor, *given: Any, forward: Any = forward, clock: Any = clock, **more: Any) -> torch.Tensor:
            x = overlap.Paced.apply(x, clock, layer_s, 1.5 * layer_s)
            return overlap.Paced.apply(forward(x, *given, **more), clock, layer_s, 1.5 * layer_s)

        layer.forward = slow


def adapted(base: nn.Module, layer_s: float) -> nn.Module:
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0))
    model.enable_input_require_grads()  # or the first layer would have no backward of its input
    if layer_s:
        pace(model, layer_s)
    return model.train()


def bases(layers: int, width: int) -> dict[str, Callable[[], nn.Module]]:
    def nf4() -> nn.Module:
        with tempfile.TemporaryDirectory() as folder:
            llama(layers, width).save_pretrained(folder)
            four_bits = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            )
            return AutoModelForCausalLM.from_pretrained(folder, quantization_config=four_bits, device_map="cpu")

    found: dict[str, Callable[[], nn.Module]] = {"bf16": lambda: llama(layers, width, torch.bfloat16)}
    return found | {"NF4": nf4} if importlib.util.find_spec("bitsandbytes") else found


class Adapters:
    """One wrapped model with adapters, on a machine of its own."""

    def __init__(self, model: nn.Module, tokens: torch.Tensor, limits: overlap.Limits, **policy: Any) -> None:
        self.model, self._tokens = model, tokens
        self._optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        with on_machine(limits=limits, update_threads=1):
            noria.wrap(model, self._optimizer, device="cpu", **{"resident": "none", **policy})
        self.losses: list[float] = []

    def step(self) -> None:
        loss = self.model(input_ids=self._tokens, labels=self._tokens).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.item())

    def turn(self) -> None:
        """Two steps: the second one's first fetches begin in the first, as in a training that goes on."""
        self.step()
        self.step()
        finish(self.model)


def adapters(args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    layers, width, context = (6, 64, 8) if args.quick else (24, 256, 32)
    tokens = torch.randint(2, VOCAB, (1, context), generator=torch.Generator().manual_seed(0))
    samples: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, make in bases(layers, width).items():
        samples[name], summary[name] = {}, {}
        for share in FETCH_SHARES[-2:] if args.quick else FETCH_SHARES:
            resident = Adapters(adapted(make(), args.layer_ms / 1e3), tokens, {}, device_memory=1.0)
            for _ in range(WARM_UP):
                resident.step()
            before = forward_us(resident)
            resident.turn()
            forward_s = (forward_us(resident) - before) / 2e6
            model = adapted(make(), args.layer_ms / 1e3)
            limits = {"fetch": (bytes_of(model) / GIB / (share * forward_s), overlap.LATENCY_US)}
            streamed = Adapters(model, tokens, limits, window=3 if args.quick else 6)
            found = take_turns({RESIDENT: resident.turn, STREAMED: streamed.turn}, args.rounds)
            samples[name][share] = found
            steps = min(len(resident.losses), len(streamed.losses))
            summary[name][share] = {
                "speed": 1 / _common.paired_ratio(found[STREAMED], found[RESIDENT])["of_pairs"],
                "turn_s": {which: _common.spread(each) for which, each in found.items()},
                "forward_s": forward_s,
                "limits": limits,
                "bytes": bytes_of(model),
                "fetches": noria.report(streamed.model, write_trace=False).num_fetches,
                "same_losses_to_the_bit": resident.losses[:steps] == streamed.losses[:steps],
            }
    torch.set_num_threads(threads)
    return samples, summary


def forward_us(run: Adapters) -> float:
    """All forwards so far."""
    wrapped = wrapped_by(run.model)
    assert wrapped is not None
    return wrapped.context.engine.statistics.step_sums()["forward_us"]


# ---- load, generate ----


def load(args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    plain = llama(*((4, 64) if args.quick else (12, 768)))
    state = {name: each.clone() for name, each in plain.state_dict().items()}
    gib = bytes_of(plain) / GIB
    samples: dict[str, list[float]] = {"wrap": [], "wrap, frozen": [], "load wrapped": [], "load plain": []}
    for _ in range(args.rounds):
        for name in ("wrap", "wrap, frozen"):
            model = copy.deepcopy(plain).requires_grad_(name == "wrap")
            made = (model, torch.optim.AdamW(model.parameters())) if name == "wrap" else (model,)
            samples[name].append(_common.seconds(lambda made=made: noria.wrap(*made, device="cpu", device_memory=1.0)))
            if name == "wrap":
                samples["load wrapped"].append(_common.seconds(lambda model=model: model.load_state_dict(state)))
        samples["load plain"].append(_common.seconds(lambda: plain.load_state_dict(state)))
    summary = {
        "gib": gib,
        "s_per_gib": {name: _common.spread([each / gib for each in taken]) for name, taken in samples.items()},
        "load_over_plain": _common.paired_ratio(samples["load wrapped"], samples["load plain"]),
    }
    return samples, summary


def generate(args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    layers, width, new = (4, 64, 4) if args.quick else (12, 512, 32)
    plain = llama(layers, width).eval()
    streamed = noria.wrap(copy.deepcopy(plain), device="cpu", device_memory=window_of(plain))
    prompt = torch.randint(2, VOCAB, (4, 16), generator=torch.Generator().manual_seed(0))
    made: dict[str, torch.Tensor] = {}

    def write(name: str, model: nn.Module) -> None:
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        made[name] = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)
        finish(model)

    works = {PLAIN: lambda: write(PLAIN, plain), STREAMED: lambda: write(STREAMED, streamed)}
    samples = take_turns(works, args.rounds, 1)
    summary = {
        "tokens_per_s": {name: _common.spread([len(prompt) * new / t for t in each]) for name, each in samples.items()},
        "speed": 1 / _common.paired_ratio(samples[STREAMED], samples[PLAIN])["of_pairs"],
        "same_tokens": torch.equal(made[PLAIN], made[STREAMED]),
    }
    return samples, summary


PARTS = {"step": trainer_steps, "adapters": adapters, "load": load, "generate": generate}


def show(summary: dict[str, Any]) -> None:
    if found := summary.get("step"):
        rows = [[n, each["median"], f"{found['over_plain'][n]['of_pairs']:.3f}"] for n, each in found["step_s"].items()]
        _common.show("a step of transformers' Trainer (s)", ["", "median", "over plain"], rows)
        print(f"same losses to the bit: {found['same_losses_to_the_bit']}")
    if found := summary.get("adapters"):
        rows = [
            [f"{base}, fetches last {share} of a forward", each["turn_s"][RESIDENT]["median"] / 2]
            + [each["turn_s"][STREAMED]["median"] / 2, f"{each['speed']:.3f}", each["same_losses_to_the_bit"]]
            for base, by_share in found.items()
            for share, each in by_share.items()
        ]
        _common.show("LoRA over a base (s a step)", ["", RESIDENT, STREAMED, "speed", "same losses"], rows)
    if found := summary.get("load"):
        rows = [[name, each["median"]] for name, each in found["s_per_gib"].items()]
        _common.show("seconds for each GiB of weights", ["", "median"], rows)
    if found := summary.get("generate"):
        rows = [[name, each["median"]] for name, each in found["tokens_per_s"].items()]
        _common.show(f"generate, tokens/s; speed {found['speed']:.3f} of plain", ["", "median"], rows)
        print(f"same tokens: {found['same_tokens']}")


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, help="measured turns of each")
    parser.add_argument("--layer-ms", type=float, help="the least that a layer of `adapters` takes forward; default: 3")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="one of the questions; may be repeated")
    args = parser.parse_args()
    args.rounds = args.rounds or (3 if args.quick else 16)
    if args.layer_ms is None:
        args.layer_ms = 1.0 if args.quick else 3.0
    began = _common.hardware()
    samples: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for name in args.only or PARTS:
        samples[name], summary[name] = PARTS[name](args)
    show(summary)
    settings = {"rounds": args.rounds, "layer_ms": args.layer_ms, "torch_threads": torch.get_num_threads()}
    _common.Result("trainers", samples, summary, settings).write(args, began)
    return 0


if __name__ == "__main__":
    sys.exit(main())

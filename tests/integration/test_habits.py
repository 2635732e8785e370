"""Habits of trainers: training that was resumed goes on bit for bit, in whatever way it is put together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.states import assert_same
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from ckpt_service.errors import StateMismatch
from trainer_hooks import Checkpointer

pytestmark = pytest.mark.filterwarnings(  # what torch.compile says while it is imported
    "ignore:.torch.jit.script_method. is (deprecated|not supported):DeprecationWarning"
)
lr_scheduler = torch.optim.lr_scheduler


@dataclass
class Habit:
    """A training: what it tracks, and its step."""

    parts: dict[str, Any]
    step: Callable[[], None]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def state(self) -> dict[str, Any]:
        return {name: copy.deepcopy(thing.state_dict()) for name, thing in self.parts.items()}


def save(root: Path, parts: Mapping[str, Any], step: int = 1) -> None:
    with Checkpointer(root, async_ckpt=False, keep_last=9) as checkpointer:
        checkpointer.track(**parts)
        checkpointer.resume() if step > 1 else None
        checkpointer.save(step)


def resume(root: Path, parts: Mapping[str, Any]) -> None:
    with Checkpointer(root, async_ckpt=False) as checkpointer:
        checkpointer.track(**parts)
        assert checkpointer.resume() is not None


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 2))


def backward(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(5, 4)).square().mean()
    loss.backward()
    return loss


def simple(model: nn.Module, *optimizers: torch.optim.Optimizer, **others: Any) -> Habit:
    """Return a training with one backward pass a step, after which all optimizers and schedulers step."""

    def step() -> None:
        model.zero_grad()
        backward(model)
        for optimizer in optimizers:
            optimizer.step()
        for other in others.values():
            other.step()

    named = {f"optimizer{number or ''}": optimizer for number, optimizer in enumerate(optimizers)}
    return Habit({"model": model, **named, **others}, step)


# --- optimizers -------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Adadelta": lambda model: torch.optim.Adadelta(model.parameters()),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters()),
    "Adam": lambda model: torch.optim.Adam(model.parameters()),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True),
    "Adamax": lambda model: torch.optim.Adamax(model.parameters()),
    "ASGD": lambda model: torch.optim.ASGD(model.parameters(), t0=2),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters()),
    "RAdam": lambda model: torch.optim.RAdam(model.parameters()),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters()),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "tensor lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True),
    "named": lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.01),
    "groups": lambda model: torch.optim.SGD(
        [{"params": list(model.parameters())[:2], "lr": 0.5}, {"params": list(model.parameters())[2:]}],
        lr=0.1,
        momentum=0.9,
    ),
    "only some parameters": lambda model: torch.optim.AdamW(list(model.parameters())[2:]),
}


def with_optimizer(name: str) -> Habit:
    model = small()
    return simple(model, OPTIMIZERS[name](model))


def lbfgs() -> Habit:
    model = small().eval()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3, history_size=4)

    def step() -> None:
        x = torch.randn(5, 4)

        def closure() -> float:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)

    return Habit({"model": model, "optimizer": optimizer}, step)


def sparse_adam() -> Habit:
    model = nn.Embedding(50, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randint(0, 50, (4,))).square().sum().backward()
        optimizer.step()

    return Habit({"model": model, "optimizer": optimizer}, step)


# --- everything else --------------------------------------------------------------------------------------------------


def several_optimizers() -> Habit:
    model = small()
    first, second = list(model[0].parameters()), list(model[3].parameters())
    return simple(model, torch.optim.AdamW(first), torch.optim.SGD(second, lr=0.1, momentum=0.9))


def accumulation() -> Habit:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(3):
            backward(model)
        optimizer.step()
        optimizer.zero_grad()

    return Habit({"model": model, "optimizer": optimizer}, step)


def grad_scaler() -> Habit:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(5, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    return Habit({"model": model, "optimizer": optimizer, "scaler": scaler}, step)


def averaged(wrap: Callable[[nn.Module], AveragedModel]) -> Habit:
    model = small()
    average = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swa = SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
    plain = simple(model, optimizer, scheduler=swa)

    def step() -> None:
        plain.step()
        average.update_parameters(model)

    return Habit({**plain.parts, "average": average}, step)


def ema_by_hand() -> Habit:
    model = small()
    ema = copy.deepcopy(model).requires_grad_(False)
    plain = simple(model, torch.optim.AdamW(model.parameters()))

    def step() -> None:
        plain.step()
        for mine, live in zip(ema.parameters(), model.parameters(), strict=True):
            mine.lerp_(live.detach(), 0.1)

    return Habit({**plain.parts, "ema": ema}, step)


def frozen() -> Habit:
    model = small()
    model[0].requires_grad_(False)
    return simple(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs().sum(1) * 10).long() % 7
        logits: torch.Tensor = self.head(self.embedding(tokens))
        return logits


def tied() -> Habit:
    model = Tied()
    return simple(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def scheduled(make: Callable[[torch.optim.Optimizer], Any]) -> Habit:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return simple(model, optimizer, scheduler=make(optimizer))


def on_plateau() -> Habit:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    def step() -> None:
        optimizer.zero_grad()
        loss = backward(model)
        optimizer.step()
        scheduler.step(float(loss.detach()))

    return Habit({"model": model, "optimizer": optimizer, "scheduler": scheduler}, step)


def one_after_another(optimizer: torch.optim.Optimizer) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 9)], milestones=[4])


class Loader:
    """Has the interface of torchdata's StatefulDataLoader: its position is taken over by the next iterator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(int(torch.randint(1000, ())))
        self.waiting: dict[str, Any] | None = None
        self.order: list[int] = []
        self.yielded = 0

    def __iter__(self) -> Iterator[int]:
        self.order, self.yielded = self._begin()
        while self.yielded < len(self.order):
            self.yielded += 1
            yield self.order[self.yielded - 1]

    def _begin(self) -> tuple[list[int], int]:
        if self.waiting is not None:
            snapshot, finished = self.waiting["_snapshot"]["_main_snapshot"], self.waiting["_iterator_finished"]
            self.waiting = None
            self.generator.set_state(snapshot["generator"])
            if snapshot["_sampler_iter_state"] and not finished:
                return snapshot["_sampler_iter_state"], snapshot["_num_yielded"]
        return torch.randperm(8, generator=self.generator).tolist(), 0

    def state_dict(self) -> dict[str, Any]:
        main = {
            "_sampler_iter_state": self.order,
            "_num_yielded": self.yielded,
            "generator": self.generator.get_state(),
        }
        workers = {"worker_0": {"worker_id": 0, "dataset_state": None, "fetcher_state": {"ended": False}}}
        snapshot = {"_snapshot_step": self.yielded, "_main_snapshot": main, "_worker_snapshots": workers}
        return {"_snapshot": snapshot, "_steps_since_snapshot": 0, "_iterator_finished": self.yielded == 8}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.waiting = state


def loader() -> Habit:
    model, batches = small(), Loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source: list[Iterator[int]] = []

    def step() -> None:
        optimizer.zero_grad()
        if not source or batches.waiting or batches.yielded == 8:
            source[:] = [iter(batches)]
        (model(torch.full((2, 4), float(next(source[0])))).square().mean()).backward()
        optimizer.step()

    return Habit({"model": model, "optimizer": optimizer, "loader": batches}, step)


HABITS: dict[str, Callable[[], Habit]] = {
    **{name: lambda name=name: with_optimizer(name) for name in OPTIMIZERS},  # type: ignore[misc]
    "LBFGS": lbfgs,
    "SparseAdam": sparse_adam,
    "several optimizers": several_optimizers,
    "gradient accumulation": accumulation,
    "GradScaler": grad_scaler,
    "SWA": lambda: averaged(lambda model: AveragedModel(model, use_buffers=True)),
    "EMA": lambda: averaged(lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))),
    "EMA by hand": ema_by_hand,
    "frozen parameters": frozen,
    "weight tying": tied,
    "OneCycleLR": lambda: scheduled(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=30)),
    "LambdaLR": lambda: scheduled(lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)),
    "warm restarts": lambda: scheduled(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3)),
    "SequentialLR": lambda: scheduled(one_after_another),
    "ReduceLROnPlateau": on_plateau,
    "data loader": loader,
}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", HABITS)
def test_training_goes_on_bit_for_bit(name: str, steps: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = HABITS[name]()
    first.train(steps)
    save(tmp_path, first.parts)
    first.train(6)
    torch.manual_seed(2)
    second = HABITS[name]()
    second.train(steps and 1)  # resumed by an optimizer that has no state yet, and by one that has
    resume(tmp_path, second.parts)
    second.train(6)
    assert_same(second.state(), first.state())


def test_the_list_of_optimizers_is_that_of_torch() -> None:
    known = {
        name
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }
    assert known - {"Muon"} <= HABITS.keys()


def test_muon_goes_on_too(tmp_path: Path) -> None:
    """It takes matrices only, and only newer versions of torch have it."""
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        assert "Muon" not in vars(torch.optim)
        return
    models = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    first, second = (simple(model, muon(model.parameters(), lr=0.1)) for model in models)
    first.train(2)
    save(tmp_path, first.parts)
    first.train(2)
    resume(tmp_path, second.parts)
    second.train(2)
    assert_same(second.state(), first.state())


# --- names that wrappers change ---------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """Puts ``module.`` before every name, as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)


class Versioned(nn.Linear):
    """Notes the version of the state that it is given."""

    _version = 3
    seen: int | None = None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        self.seen = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "compiled": torch.compile,
    "DDP": Wrapper,
    "DDP of compiled": lambda model: Wrapper(torch.compile(model)),  # type: ignore[arg-type]
    "compiled DDP": lambda model: torch.compile(Wrapper(model)),  # type: ignore[return-value]
}


@pytest.mark.parametrize("now", WRAPPINGS)
@pytest.mark.parametrize("then", WRAPPINGS)
def test_names_are_found_behind_the_prefixes_of_wrappers(then: str, now: str, tmp_path: Path) -> None:
    saved, live = (nn.Sequential(Versioned(3, 2), nn.BatchNorm1d(2)) for _ in range(2))
    saved[1].num_batches_tracked.fill_(7)
    save(tmp_path, {"model": WRAPPINGS[then](saved)})
    resume(tmp_path, {"model": WRAPPINGS[now](live)})
    assert_same(live.state_dict(), saved.state_dict())
    assert live[0].seen == 3


def test_a_part_that_is_compiled_alone(tmp_path: Path) -> None:
    saved, live = small(), small()
    live[0] = torch.compile(live[0])
    save(tmp_path, {"model": saved})
    resume(tmp_path, {"model": live})
    assert torch.equal(live[0].weight, saved[0].weight)


class Twofold(nn.Module):
    """Without the parts of names that wrappers add, two of its names would be one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.module = nn.ParameterDict({"weight": torch.ones(2)})


def test_prefixes_are_left_alone_where_two_names_would_become_one(tmp_path: Path) -> None:
    save(tmp_path, {"model": Twofold()})
    resume(tmp_path, {"model": Twofold()})
    with pytest.raises(StateMismatch, match=r"stage_state_dict: module\.module\.weight was not saved; "):
        resume(tmp_path, {"model": Wrapper(Twofold())})


# --- shapes that change -----------------------------------------------------------------------------------------------


class WithLora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a, self.lora_b = (
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.base(x) + self.lora_b(self.lora_a(x)))


def test_a_state_that_grows_and_shrinks_between_saves(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8))
    shapes = []
    with Checkpointer(tmp_path, keep_last=3) as checkpointer:
        checkpointer.track(model=model)
        for step, tokens in enumerate((4, 5000, 6)):
            model[0] = nn.Embedding(tokens, 8)
            if step == 2:
                model[1] = WithLora(model[1])
            checkpointer.track(optimizer=torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))
            paths = checkpointer.save(step).wait_committed(60)
            state = torch.load(str(paths), weights_only=True)["stage_state_dict"]
            shapes.append({name: tuple(tensor.shape) for name, tensor in state.items()})
            assert_same(dict(state), {name: tensor.detach() for name, tensor in model.state_dict().items()})
    assert [found["0.weight"] for found in shapes] == [(4, 8), (5000, 8), (6, 8)]
    assert [len(found) for found in shapes] == [3, 3, 5]


def refused(root: Path, parts: Mapping[str, Any], message: str) -> None:
    before = {name: copy.deepcopy(thing.state_dict()) for name, thing in parts.items()}
    generators = torch.get_rng_state()
    with pytest.raises(StateMismatch, match=message):
        resume(root, parts)
    assert_same({name: thing.state_dict() for name, thing in parts.items()}, before)
    assert torch.equal(torch.get_rng_state(), generators)


def test_lora_that_was_added_since_is_named(tmp_path: Path) -> None:
    base = nn.Linear(4, 4)
    save(tmp_path, {"model": base})
    refused(
        tmp_path,
        {"model": WithLora(nn.Linear(4, 4))},
        r"stage_state_dict: base\.bias was not saved \(and 3 more\); stage_state_dict: bias was saved and is not there",
    )


def test_embeddings_that_were_resized_since_are_named(tmp_path: Path) -> None:
    save(tmp_path, {"model": nn.Sequential(nn.Embedding(4, 8), nn.Embedding(4, 8))})
    resized = nn.Sequential(nn.Embedding(5, 8), nn.Embedding(5, 8))
    shapes = r"was saved with shape \(4, 8\) and has \(5, 8\) now"
    refused(tmp_path, {"model": resized}, rf"stage_state_dict: 0\.weight {shapes} \(and 1 more\)")


def test_moments_of_another_shape_are_named_although_the_model_is_not_tracked(tmp_path: Path) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(4, 3)
    training = simple(first, torch.optim.AdamW(first.parameters()))
    first(torch.ones(1, 3)).sum().backward()
    training.parts["optimizer"].step()
    save(tmp_path, {"optimizer": training.parts["optimizer"]})
    shapes = r"was saved with shape \(3, 3\) and has \(3, 4\) now \(and 1 more\)"
    other = torch.optim.AdamW(second.parameters())
    refused(tmp_path, {"optimizer": other}, rf"optimizer_state_dict: state\.0\.exp_avg {shapes}")


def test_a_parameter_that_was_unfrozen_since_is_refused(tmp_path: Path) -> None:
    model = small()
    save(tmp_path, {"optimizer": torch.optim.AdamW(list(model.parameters())[2:])})
    groups = r"optimizer_state_dict: parameter groups of \[2\] parameters were saved, and there are \[4\]"
    refused(tmp_path, {"optimizer": torch.optim.AdamW(model.parameters())}, groups)


def test_a_scaler_that_was_switched_off_is_refused_by_its_own_words(tmp_path: Path) -> None:
    save(tmp_path, {"scaler": torch.amp.GradScaler("cpu", enabled=False)})
    with pytest.raises(StateMismatch, match=r"scaler refuses its state: RuntimeError: .*disabled"):
        resume(tmp_path, {"scaler": torch.amp.GradScaler("cpu")})


def test_lazy_modules_take_the_shapes_that_were_saved(tmp_path: Path) -> None:
    saved, live = nn.Linear(3, 2), nn.LazyLinear(2)
    save(tmp_path, {"model": saved})
    resume(tmp_path, {"model": live})
    assert_same(live.state_dict(), saved.state_dict())

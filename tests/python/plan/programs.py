"""Small models, and whole training programs that the real planner writes for them. A cell is 512 bytes."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from noria import _C

CELL = _C.TENSOR_ALIGNMENT


@dataclass
class Model:
    """Units by (weights, gradients) in cells; gradients 0: frozen. `forward`: what each visit needs."""

    sizes: list[tuple[int, int]]
    forward: list[list[int]]
    buffers: _C.BufferTable = field(default_factory=_C.BufferTable)
    units: list[_C.UnitFacts] = field(default_factory=list)

    def __post_init__(self):
        end = 0
        for unit, (weights, gradients) in enumerate(self.sizes):
            ids = []
            for purpose, cells in (
                ("working_copy", weights),
                ("held_gradient", max(gradients, 1)),
                ("optimizer_state", 2 * weights),
            ):
                ids.append(self.buffers.intern("host", end * CELL, cells * CELL, purpose, unit))
                end += cells
            self.units.append(_C.UnitFacts(f"blocks.{unit}", weights * CELL, gradients * CELL, *ids))

    @property
    def names(self):
        return [unit.name for unit in self.units]

    def trainable(self, unit):
        return self.sizes[unit][1] > 0

    def visits(self, phase):
        """Of one pass. In backward a unit's gradients arrive at its every use."""
        if phase == "forward":
            return [_C.Visit(hook, phase, needs) for hook, needs in enumerate(self.forward)]
        order = reversed(list(enumerate(self.forward)))
        return [_C.Visit(hook, phase, needs, [u for u in needs if self.trainable(u)]) for hook, needs in order]

    def smallest(self):
        return _C.smallest_budget(self.visits("forward") + self.visits("backward"), self.units)

    def whole(self):
        """An arena in which everything fits side by side."""
        return sum(weights + gradients for weights, gradients in self.sizes) * CELL

    def plan(self, visits, arena, window=0, next_visits=(), entry=(), adds=False):
        request = _C.PlanRequest(visits, arena, window, list(next_visits), list(entry), adds=adds)
        return _C.plan_pass(request, self.units, self.buffers)


@st.composite
def models(draw, equal=False, trainable=None):
    """Unequal sizes, frozen units, units that several visits share, visits that need several units."""
    num_units = draw(st.integers(1, 6))
    if equal:
        sizes = [(1, 1)] * num_units
    else:
        gradients = st.integers(1, 4) if trainable else st.integers(0, 4)
        sizes = draw(st.lists(st.tuples(st.integers(1, 4), gradients), min_size=num_units, max_size=num_units))
    need = st.sets(st.integers(0, num_units - 1), min_size=1, max_size=min(3, num_units)).map(sorted)
    extra = draw(st.lists(need, max_size=4))
    return Model(sizes, draw(st.permutations([[unit] for unit in range(num_units)] + extra)))


@st.composite
def budgets(draw, model):
    """From the smallest to room for all; the window capped or not."""
    arena, window = model.smallest()
    spare = max(model.whole() - arena, 0) // CELL
    cap = draw(st.one_of(st.just(0), st.integers(window, window + 3)))
    return arena + draw(st.integers(0, spare)) * CELL, cap


class Program:
    """Plans of passes, updates and the user's own ops, strung together as an engine would issue them.

    A plan's versions are relative to the beginning of its pass; here they become absolute.
    """

    def __init__(self, model, arena, window=0, poison=False):
        self.model, self.arena, self.window, self.poison = model, arena, window, poison
        self.ops, self.plans = [], []
        self.version = {}
        self.resident = []  # (unit, offset), at the home's version

    def _issue(self, lane, verb, unit, accesses, bytes=0):
        self.ops.append(_C.Op(len(self.ops), lane, verb, unit, bytes, -1, accesses))

    def _read(self, buffer):
        return _C.Access(buffer, self.version.get(buffer, 0), "read")

    def _write(self, buffer):
        self.version[buffer] = self.version.get(buffer, 0) + 1
        return _C.Access(buffer, self.version[buffer], "write")

    def _poison(self, buffer):
        self.version[buffer] = -1
        range_of = self.model.buffers[buffer]
        self._issue("fetch", "poison", range_of.unit, [_C.Access(buffer, -1, "write")], range_of.bytes)

    def run_pass(self, phase, next_phase=None, update_between=False, adds=False):
        model = self.model
        next_visits = model.visits(next_phase) if next_phase else []
        if update_between:
            next_visits = [
                _C.Visit(visit.hook, visit.phase, [u for u in visit.needs if not model.trainable(u)])
                for visit in next_visits
            ]
        plan = model.plan(model.visits(phase), self.arena, self.window, next_visits, self.resident, adds)
        self.plans.append(plan)
        self.resident = plan.exit
        for op in plan.ops:
            if op.verb == "evict":
                if self.poison:
                    self._poison(op.accesses[0].buffer)
                continue
            accesses = []
            for access in op.accesses:
                buffer = access.buffer
                if access.mode == "read":
                    accesses.append(self._read(buffer))
                elif (
                    op.verb == "fetch" and model.buffers[buffer].purpose == "weights"
                ):  # a lease has the version of what was copied into it
                    self.version[buffer] = self.version.get(model.units[op.unit].working, 0)
                    accesses.append(_C.Access(buffer, self.version[buffer], "write"))
                else:
                    accesses.append(self._write(buffer))
            self._issue(op.lane, op.verb, op.unit, accesses, op.bytes)
            if op.verb == "drain" and self.poison:
                self._poison(op.accesses[0].buffer)

    def user(self):
        """A clip or edit of every held gradient, on the compute lane."""
        held = [unit.held for unit in self.model.units if unit.gradients]
        self._issue("compute", "user", -1, [a for h in held for a in (self._read(h), self._write(h))])

    def update(self):
        for index, unit in enumerate(self.model.units):
            if not unit.gradients:
                continue
            reads = [self._read(unit.held), self._read(unit.state)]
            self._issue(
                "update",
                "update",
                index,
                [*reads, self._write(unit.state), self._write(unit.working)],
                unit.weights,
            )
        # Device copies of what was updated are stale: their memory is free, but may still be read.
        stale = {unit for unit, _ in self.resident if self.model.trainable(unit)}
        if self.poison:
            for unit, offset in self.resident:
                if unit in stale:
                    size = self.model.units[unit].weights
                    self._poison(self.model.buffers.intern("device:0", offset, size, "weights", unit))
        self.resident = [(unit, offset) for unit, offset in self.resident if unit not in stale]


def training(model, arena, window=0, steps=2, micro_batches=1, poison=False, clip=True):
    """`steps` steps of `micro_batches` forward and backward passes, perhaps a clip, and an update."""
    program = Program(model, arena, window, poison)
    for _ in range(steps):
        for micro_batch in range(micro_batches):
            program.run_pass("forward", "backward")
            is_last = micro_batch == micro_batches - 1
            program.run_pass("backward", "forward", update_between=is_last, adds=micro_batch > 0)
        if clip:
            program.user()
        program.update()
    return program

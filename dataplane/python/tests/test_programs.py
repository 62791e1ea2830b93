"""Programs as tenants write them, with the losses that gloo gives them: exact where two ranks add, and within rounding where more do."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from test_torch import group
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 6, 8
WORDS, LENGTH, WIDTH = 61, 24, 64


class Transformer(nn.Module):
    """Predicts the next word of a text."""

    def __init__(self, layers=2):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        block = lambda: nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, text):
        known = self.words(text) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for block in self.blocks:
            known = block(known, src_mask=mask)
        return self.head(known)


def text(step, rank):
    """Each word is the sum of the two before it, which is to be learnt."""
    numbers = torch.randint(WORDS, (BATCH, 2), generator=torch.Generator().manual_seed(1000 * step + rank))
    words = list(numbers.unbind(1))
    for _ in range(LENGTH - 1):
        words.append((words[-1] + words[-2]) % WORDS)
    words = torch.stack(words, 1)
    return words[:, :LENGTH], words[:, 1 : LENGTH + 1]


def image(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, 3, 16, 16, generator=generator), torch.randint(10, (BATCH,), generator=generator)


def trained(model, rank, data, optimizer=None, finish=lambda: None):
    """The loss of each step; `finish` sees to gradients that the model leaves to the program."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        given, wanted = data(step, rank)
        loss = cross_entropy(model(given).flatten(0, -2), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        finish()
        optimizer.step()
        losses.append(loss.item())
    return losses


def seeded(make, seed=3):
    torch.manual_seed(seed)
    return make()


def transformer_by_ddp(rank, ranks):
    return trained(DistributedDataParallel(seeded(Transformer), bucket_cap_mb=0.1), rank, text)


def transformer_by_fsdp(rank, ranks):
    from torch.distributed.fsdp import FullyShardedDataParallel as Sharded
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({nn.TransformerEncoderLayer})
    model = Sharded(seeded(Transformer), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    return trained(model, rank, text)


def transformer_by_fully_shard(rank, ranks):
    from torch.distributed.fsdp import fully_shard

    mesh, model = dist.init_device_mesh("cpu", (ranks,)), seeded(Transformer)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, rank, text)


def convolutional(rank, ranks):
    """With BatchNorm, whose buffers rank 0 hands out before each step."""
    layer = lambda out, into: [nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]
    make = lambda: nn.Sequential(*layer(16, 3), *layer(32, 16), nn.Flatten(), nn.Linear(32 * 16, 10))
    return trained(DistributedDataParallel(seeded(make)), rank, image)


class Mixture(nn.Module):
    """A layer whose words go each to the rank with their expert, as many as there are, and back."""

    def __init__(self, rank, ranks):
        super().__init__()
        self.words, self.gate = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, ranks)
        self.head = nn.Linear(WIDTH, WORDS)
        torch.manual_seed(100 + rank)
        self.expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, text):
        known = self.words(text).flatten(0, 1)
        weights, experts = self.gate(known).softmax(1).max(1)
        order = experts.argsort(stable=True)
        sent = torch.bincount(experts, minlength=self.gate.out_features)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sent, received = sent.tolist(), received.tolist()
        there = functional.all_to_all_single_autograd(known[order], received, sent, dist.group.WORLD)
        back = functional.all_to_all_single_autograd(self.expert(there), sent, received, dist.group.WORLD)
        placed = torch.zeros_like(known).index_copy(0, order, back)
        return self.head(known + weights[:, None] * placed).unflatten(0, text.shape)

    def average(self):
        """Averages the gradients of what all ranks have alike."""
        for module in (self.words, self.gate, self.head):
            for parameter in module.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def mixture_of_experts(rank, ranks):
    model = seeded(lambda: Mixture(rank, ranks))
    return trained(model, rank, text, torch.optim.SGD(model.parameters(), lr=0.1), model.average)


def pipeline(rank, ranks):
    """A stage a rank. Only the last knows the losses."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stages = [seeded(lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh()), seed) for seed in range(ranks)]
    stage = PipelineStage(stages[rank], rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(stages[rank].parameters(), lr=0.5)
    known = []
    for step in range(STEPS):
        given = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        losses = []
        first, last = rank == 0, rank == ranks - 1
        schedule.step(*[given] if first else [], **({"target": given.flip(1).tanh(), "losses": losses} if last else {}))
        optimizer.step()
        known += [loss.item() for loss in losses]
    return known or [0.0]


def run(path, backend, program):
    with group(path, backend) as (rank, ranks):
        return program(rank, ranks)


PROGRAMS = [
    transformer_by_ddp,
    transformer_by_fsdp,
    transformer_by_fully_shard,
    convolutional,
    mixture_of_experts,
    pipeline,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_has_the_losses_of_gloo(team, tmp_path, program):
    own = team.run(run, tmp_path / "own", "harmonaize", program)
    gloo = team.run(run, tmp_path / "gloo", "gloo", program)
    for ours, theirs in zip(own, gloo):
        # Two summands have one order.
        assert ours == theirs if team.ranks == 2 else torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5)
    first, last = (sum(losses[at] for losses in own) for at in (0, -1))
    assert last < first, "it learns nothing"

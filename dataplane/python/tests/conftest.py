"""What tests share: teams of ranks against real agents."""

import pytest
from team import SOCKETS, Team

# Ranks, and whether they are spread over the hosts.
TEAMS = {"2 on a host": (2, False), "4 on two hosts": (4, True)}
_teams = {}


def pytest_configure(config):
    if not SOCKETS:
        raise pytest.UsageError("these tests need agents: run `cargo xtask wheel`, which sets HARMONAIZE_SOCKETS")


def _team(name):
    team = _teams.get(name)
    if team is None or any(not process.is_alive() for process, _ in team.members):
        if team is not None:
            team.end()
        team = _teams[name] = Team(*TEAMS[name])
    return team


@pytest.fixture(params=list(TEAMS))
def team(request):
    """Each kind of team in turn."""
    yield from _kept(request, request.param)


@pytest.fixture
def spread(request):
    """Four ranks on two hosts."""
    yield from _kept(request, "4 on two hosts")


@pytest.fixture
def pair(request):
    """Two ranks on one host."""
    yield from _kept(request, "2 on a host")


def _kept(request, name):
    failed = request.session.testsfailed
    yield _team(name)
    if request.session.testsfailed > failed:
        # Its ranks may be anywhere.
        _teams.pop(name).end()


@pytest.fixture
def lone():
    """Two ranks of whom one may be killed."""
    team = Team(2, True)
    yield team
    team.end()


def pytest_sessionfinish():
    for team in _teams.values():
        team.end()

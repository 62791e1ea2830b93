"""Ranks as processes: teams that run functions of the tests, and stay for the next test."""

import multiprocessing
import os
import secrets
import time
import traceback

SPAWN = multiprocessing.get_context("spawn")
# A host's socket each, as `cargo xtask wheel` names them.
SOCKETS = [socket for socket in os.environ.get("HARMONAIZE_SOCKETS", "").split(",") if socket]


def _work(pipe, rank, ranks, socket, job):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    os.environ.update(HARMONAIZE_SOCKET=socket, HARMONAIZE_JOB=job)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


class Failed(Exception):
    """What a rank raised."""


class Team:
    """So many ranks: on the first host, or spread over all."""

    def __init__(self, ranks, spread):
        self.ranks, self.members = ranks, []
        # Teams are side by side, and their communicators do not meet.
        job = f"team-{secrets.token_hex(4)}"
        for rank in range(ranks):
            socket = SOCKETS[rank * len(SOCKETS) // ranks if spread else 0]
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=_work, args=(theirs, rank, ranks, socket, job), daemon=True)
            process.start()
            theirs.close()
            self.members.append((process, ours))

    def start(self, function, *arguments):
        for _, pipe in self.members:
            pipe.send((function, arguments))

    def collect(self, within=120.0):
        """What each rank returned: none for one that is gone."""
        deadline, answers, failures = time.monotonic() + within, [], []
        for rank, (_, pipe) in enumerate(self.members):
            answer = None
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    failures.append(f"rank {rank} has not answered within {within} s")
                else:
                    fine, answer = pipe.recv()
                    if not fine:
                        failures.append(f"rank {rank}:\n{answer}")
            except (EOFError, ConnectionResetError):
                pass
            answers.append(answer)
        if failures:
            raise Failed("\n".join(failures))
        return answers

    def run(self, function, *arguments):
        self.start(function, *arguments)
        return self.collect()

    def end(self):
        for process, pipe in self.members:
            pipe.close()
            process.terminate()
        for process, _ in self.members:
            process.join()

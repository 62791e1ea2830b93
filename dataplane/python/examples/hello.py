"""Hello, collective: each rank gives its number, and all get the sum."""

import harmonaize

client = harmonaize.Client()  # the agent's socket: HARMONAIZE_SOCKET
job = client.join("hello")  # the rank, as torchrun or another launcher sets it
tensor = client.tensor("float32", 1024)
tensor.numpy()[:] = job.rank
receipt = job.all_reduce(tensor).wait(timeout=60)
print(f"rank {job.rank} of {job.ranks}: {tensor.numpy()[0]:.0f}, by {receipt.algorithm}", flush=True)

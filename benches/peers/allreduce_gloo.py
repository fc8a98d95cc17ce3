"""Times PyTorch's gloo all-reduce (f32, sum) between processes of this machine: allreduce_gloo.py [N] [SIZES] [MS] [ROUNDS]

Measures as `trainer bench allreduce --cpus N --sizes SIZES --ms MS --json` does: the same sizes in bytes (separated by
commas), in place on the same buffer, the slowest rank's time, the median of ROUNDS rounds that last MS milliseconds in total
after a quarter of that time for warming up. Every process has one thread. Prints the same JSON.
"""

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = "4,64,1024,16384,65536,1048576,4194304,47185920"


def measure(rank, world, count, ms, rounds):
    data = torch.tensor([1 + (rank * 7 + i) % 3 for i in range(3)], dtype=torch.float32).repeat(count // 3 + 1)[:count]
    want = torch.tensor([sum(1 + (r * 7 + i) % 3 for r in range(world)) for i in range(3)], dtype=torch.float32)
    dist.all_reduce(data)
    wrong = torch.tensor([(data != want.repeat(count // 3 + 1)[:count]).sum().item()])
    dist.all_reduce(wrong)

    def turns(times):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(data)
        slowest = torch.tensor([(time.perf_counter() - start) / times], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    clamp = lambda value, low, high: max(low, min(high, int(value)))
    guess = turns(3)
    guess = turns(clamp(ms / 4e3 / guess, 2, 20_000))
    each = clamp(ms / 1e3 / rounds / guess, 3, 100_000)
    # Results stay in place: start from numbers that stay finite as long as possible.
    data.fill_(1e-30)
    return statistics.median(turns(each) for _ in range(rounds)), wrong.item()


def rank_main(rank, world, sizes, ms, rounds, port):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    results = []
    for size in sizes:
        seconds, wrong = measure(rank, world, size // 4, ms, rounds)
        algbw = size / seconds / 1e9
        row = {"bytes": size, "count": size // 4, "type": "f32", "redop": "sum", "time_us": seconds * 1e6}
        row |= {"algbw_gbs": algbw, "busbw_gbs": algbw * 2 * (world - 1) / world, "wrong": wrong}
        results.append(row)
    if rank == 0:
        print(json.dumps({"results": results}))
    dist.barrier()
    dist.destroy_process_group()


def main():
    given = sys.argv[1:]
    world = int(given[0]) if given else 2
    sizes = [int(size) for size in (given[1] if len(given) > 1 else SIZES).split(",")]
    ms = float(given[2]) if len(given) > 2 else 400.0
    rounds = int(given[3]) if len(given) > 3 else 3
    # The kernel chooses the port.
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    mp.spawn(rank_main, (world, sizes, ms, rounds, server.port), nprocs=world)


if __name__ == "__main__":
    main()

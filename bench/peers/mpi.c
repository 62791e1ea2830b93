/* One rank of MPI, or with CCL defined (as C++) of oneCCL over it: a collective of f32, out of place, checked and timed over sizes; rank 0
 * prints a line of JSON a size. Its time is the greatest of the ranks' medians of single operations.
 * Usage: mpi COLLECTIVE BUDGET_US BYTES:ITERATIONS... under mpirun. COLLECTIVE as harmonaize-perf names it, BYTES of the larger tensor,
 * ITERATIONS at most: at least three, and fewer than that where they would take longer than the budget. COLLECTIVE may be recorded:
 * AllReduces of one iteration in place, each as BYTES:MICROSECOND of its beginning. It may be in-turn: AllReduces that are waited for, each
 * as BYTES:MICROSECONDS of computing before it. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef CCL
#include <oneapi/ccl.hpp>
#include <vector>
#endif

enum kind { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALLTOALL, BROADCAST, ALLTOALLV, SENDRECV, REDUCE, GATHER, SCATTER, KINDS };
/* Of ALLTOALLV: rank 0 gets so many times what each other rank gets. */
enum { SKEW = 4 };
static const char *const names[KINDS] = {"all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast",
                                         "alltoallv", "sendrecv", "reduce", "gather", "scatter"};
static int rank, ranks;

/* Of ALLTOALLV: elements to each and from each, and where they begin. */
static int *sent, *received, *sent_at, *received_at;

static void skew(int count)
{
    size_t room = sizeof(int) * (size_t)ranks;
    sent = (int *)realloc(sent, room), received = (int *)realloc(received, room);
    sent_at = (int *)realloc(sent_at, room), received_at = (int *)realloc(received_at, room);
    if (!sent || !received || !sent_at || !received_at)
        MPI_Abort(MPI_COMM_WORLD, 3);
    for (int r = 0; r < ranks; r++) {
        sent[r] = count * (r == 0 ? SKEW : 1);
        received[r] = count * (rank == 0 ? SKEW : 1);
        sent_at[r] = r == 0 ? 0 : count * (SKEW + r - 1);
        received_at[r] = r * received[r];
    }
}

/* What oneCCL has no call for goes by MPI. */
static void run_by_mpi(int kind, float *input, float *output, int count)
{
    switch (kind) {
    case SENDRECV:
        MPI_Sendrecv(input, count, MPI_FLOAT, (rank + 1) % ranks, 0, output, count, MPI_FLOAT, (rank + ranks - 1) % ranks, 0,
                     MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        break;
    case GATHER:
        MPI_Gather(input, count, MPI_FLOAT, output, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
        break;
    default:
        MPI_Scatter(input, count, MPI_FLOAT, output, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
    }
}

#ifdef CCL
/* The input of an operation in place. */
#define IN_PLACE(tensor) (tensor)

static ccl::communicator *communicator;

static void begin(void)
{
    ccl::init();
    ccl::kvs::address_type address;
    ccl::shared_ptr_class<ccl::kvs> kvs;
    if (rank == 0) {
        kvs = ccl::create_main_kvs();
        address = kvs->get_address();
    }
    MPI_Bcast(address.data(), (int)address.size(), MPI_BYTE, 0, MPI_COMM_WORLD);
    if (rank != 0)
        kvs = ccl::create_kvs(address);
    communicator = new ccl::communicator(ccl::create_communicator(ranks, rank, kvs));
}

static void run(int kind, float *input, float *output, int count)
{
    size_t block = (size_t)count;
    switch (kind) {
    case ALL_REDUCE:
        ccl::allreduce(input, output, block, ccl::reduction::sum, *communicator).wait();
        break;
    case ALL_GATHER:
        ccl::allgatherv(input, block, output, std::vector<size_t>((size_t)ranks, block), *communicator).wait();
        break;
    case REDUCE_SCATTER:
        ccl::reduce_scatter(input, output, block, ccl::reduction::sum, *communicator).wait();
        break;
    case ALLTOALL:
        ccl::alltoall(input, output, block, *communicator).wait();
        break;
    case ALLTOALLV:
        ccl::alltoallv(input, std::vector<size_t>(sent, sent + ranks), output, std::vector<size_t>(received, received + ranks),
                       *communicator)
            .wait();
        break;
    case REDUCE:
        ccl::reduce(input, output, block, ccl::reduction::sum, 0, *communicator).wait();
        break;
    case BROADCAST:
        ccl::broadcast(output, block, 0, *communicator).wait();
        break;
    default:
        run_by_mpi(kind, input, output, count);
    }
}
#else
#define IN_PLACE(tensor) ((float *)MPI_IN_PLACE)

static void begin(void) {}

static void run(int kind, float *input, float *output, int count)
{
    switch (kind) {
    case ALL_REDUCE:
        MPI_Allreduce(input, output, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        break;
    case ALL_GATHER:
        MPI_Allgather(input, count, MPI_FLOAT, output, count, MPI_FLOAT, MPI_COMM_WORLD);
        break;
    case REDUCE_SCATTER:
        MPI_Reduce_scatter_block(input, output, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        break;
    case ALLTOALL:
        MPI_Alltoall(input, count, MPI_FLOAT, output, count, MPI_FLOAT, MPI_COMM_WORLD);
        break;
    case ALLTOALLV:
        MPI_Alltoallv(input, sent, sent_at, MPI_FLOAT, output, received, received_at, MPI_FLOAT, MPI_COMM_WORLD);
        break;
    case REDUCE:
        MPI_Reduce(input, output, count, MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
        break;
    case BROADCAST:
        MPI_Bcast(output, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
        break;
    default:
        run_by_mpi(kind, input, output, count);
    }
}
#endif

/* Values that tell ranks and places apart, exact in f32. */
static float value(int of, long element) { return (float)((of + 1) * 7 + element % 1021); }

static float expected(int kind, long block, long element)
{
    float sum = 0;
    if (kind == ALLTOALLV && rank == 0)
        block *= SKEW;
    long of = element / block, within = element % block;
    switch (kind) {
    case ALL_GATHER:
    case GATHER:
        return value((int)of, within);
    case SCATTER:
        return value(0, rank * block + element);
    case ALLTOALL:
        return value((int)of, rank * block + within);
    case ALLTOALLV:
        return value((int)of, rank == 0 ? within : (SKEW + rank - 1) * block + within);
    case BROADCAST:
        return value(0, element);
    case SENDRECV:
        return value((rank + ranks - 1) % ranks, element);
    default:
        for (int r = 0; r < ranks; r++)
            sum += value(r, kind == REDUCE_SCATTER ? rank * block + element : element);
        return sum;
    }
}

/* Whether each rank has the whole tensor, and not a block of each other rank. */
static int is_whole(int kind) { return kind == ALL_REDUCE || kind == BROADCAST || kind == SENDRECV || kind == REDUCE; }

/* Whether rank 0 alone has a result. */
static int is_gathered(int kind) { return kind == REDUCE || kind == GATHER; }

static int order(const void *a, const void *b)
{
    double one = *(const double *)a, other = *(const double *)b;
    return (one > other) - (one < other);
}

static float *room(long elements)
{
    float *made = (float *)aligned_alloc(4096, ((size_t)elements * 4 + 4095) / 4096 * 4096 + 4096);
    if (!made)
        MPI_Abort(MPI_COMM_WORLD, 3);
    return made;
}

static void measure(int kind, double budget_us, long bytes, int iterations)
{
    int blocks = is_whole(kind) ? 1 : kind == ALLTOALLV ? SKEW * ranks : ranks;
    /* As nccl-tests: several blocks are multiples of 16 bytes each. */
    long block = blocks == 1 ? bytes / 4 : bytes / 4 / blocks / 4 * 4, wrong = 0;
    long of_input = block * (kind == ALL_GATHER || kind == GATHER ? 1 : blocks);
    long of_output = block * (kind == REDUCE_SCATTER || kind == SCATTER ? 1 : blocks);
    if (kind == ALLTOALLV) {
        of_input = block * (SKEW + ranks - 1), of_output = block * (rank == 0 ? SKEW * ranks : ranks);
        skew((int)block);
    }
    float *input = room(of_input), *output = room(of_output);
    for (long i = 0; i < of_input; i++)
        input[i] = value(rank, i);
    for (long i = 0; i < of_output; i++)
        output[i] = kind == BROADCAST ? value(rank, i) : -1.0f;
    run(kind, input, output, (int)block);
    for (long i = 0; i < of_output && (rank == 0 || !is_gathered(kind)); i++)
        wrong += output[i] != expected(kind, block, i);
    MPI_Barrier(MPI_COMM_WORLD);
    double began = MPI_Wtime();
    run(kind, input, output, (int)block);
    double affordable = budget_us / ((MPI_Wtime() - began) * 1e6 + 0.01);
    if (affordable < iterations)
        iterations = affordable < 3 ? 3 : (int)affordable;
    MPI_Bcast(&iterations, 1, MPI_INT, 0, MPI_COMM_WORLD);
    for (int i = 0; i < iterations / 10; i++)
        run(kind, input, output, (int)block);
    double *times = (double *)malloc(sizeof(double) * (size_t)iterations);
    if (!times)
        MPI_Abort(MPI_COMM_WORLD, 3);
    MPI_Barrier(MPI_COMM_WORLD);
    for (int i = 0; i < iterations; i++) {
        double at = MPI_Wtime();
        run(kind, input, output, (int)block);
        times[i] = (MPI_Wtime() - at) * 1e6;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    qsort(times, (size_t)iterations, sizeof *times, order);
    double own = times[(iterations + 1) / 2 - 1], p50 = 0;
    long all_wrong = 0;
    MPI_Reduce(&own, &p50, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    MPI_Reduce(&wrong, &all_wrong, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        printf("{\"bytes\": %ld, \"p50_us\": %.3f, \"wrong\": %ld}\n", bytes, p50, all_wrong);
        fflush(stdout);
    }
    free(times);
    free(input);
    free(output);
}

/* Three iterations, after one that is not timed: AllReduces at their times, until the last is done. Times count from the iteration's
 * beginning, and in turn from the end of the operation before. */
static void recorded(int count, char **operations, int in_turn)
{
    enum { ITERATIONS = 3 };
    float **tensors = (float **)calloc((size_t)count, sizeof *tensors);
    long *bytes = (long *)calloc((size_t)count, sizeof *bytes), *at = (long *)calloc((size_t)count, sizeof *at);
    long all = 0, wrong = 0, all_wrong = 0;
    double times[ITERATIONS], p50 = 0;
    if (!tensors || !bytes || !at)
        MPI_Abort(MPI_COMM_WORLD, 3);
    for (int i = 0; i < count; i++) {
        if (sscanf(operations[i], "%ld:%ld", &bytes[i], &at[i]) != 2)
            MPI_Abort(MPI_COMM_WORLD, 2);
        all += bytes[i];
        tensors[i] = room(bytes[i] / 4);
        for (long j = 0; j < bytes[i] / 4; j++)
            tensors[i][j] = (float)(rank + 1);
    }
#ifdef CCL
    std::vector<ccl::event> under_way((size_t)count);
#else
    MPI_Request *under_way = (MPI_Request *)calloc((size_t)count, sizeof *under_way);
    if (!under_way)
        MPI_Abort(MPI_COMM_WORLD, 3);
#endif
    for (int iteration = -1; iteration < ITERATIONS; iteration++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double began = MPI_Wtime(), since = began;
        for (int i = 0; i < count; i++) {
            double early = (double)at[i] - (MPI_Wtime() - since) * 1e6;
            if (early >= 1)
                usleep((useconds_t)early);
            if (in_turn) {
                run(ALL_REDUCE, IN_PLACE(tensors[i]), tensors[i], (int)(bytes[i] / 4));
                since = MPI_Wtime();
                continue;
            }
#ifdef CCL
            under_way[(size_t)i] = ccl::allreduce(tensors[i], tensors[i], (size_t)bytes[i] / 4, ccl::reduction::sum, *communicator);
#else
            MPI_Iallreduce(MPI_IN_PLACE, tensors[i], (int)(bytes[i] / 4), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &under_way[i]);
#endif
        }
#ifdef CCL
        for (size_t i = 0; i < under_way.size() && !in_turn; i++)
            under_way[i].wait();
#else
        for (int i = 0; i < count && !in_turn; i++)
            MPI_Wait(&under_way[i], MPI_STATUS_IGNORE);
#endif
        if (iteration >= 0)
            times[iteration] = (MPI_Wtime() - began) * 1e6;
    }
    /* Sums of sums: each iteration but the first has as many times the one before's as there are ranks. */
    float sums = (float)(ranks * (ranks + 1) / 2);
    for (int i = 0; i < ITERATIONS; i++)
        sums *= (float)ranks;
    for (int i = 0; i < count; i++)
        for (long j = 0; j < bytes[i] / 4; j++)
            wrong += tensors[i][j] != sums;
    qsort(times, ITERATIONS, sizeof *times, order);
    MPI_Reduce(&times[ITERATIONS / 2], &p50, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    MPI_Reduce(&wrong, &all_wrong, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        printf("{\"bytes\": %ld, \"p50_us\": %.3f, \"wrong\": %ld}\n", all, p50, all_wrong);
        fflush(stdout);
    }
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int in_turn = argc > 3 && !strcmp(argv[1], "in-turn");
    if (in_turn || (argc > 3 && !strcmp(argv[1], "recorded"))) {
        begin();
        recorded(argc - 3, argv + 3, in_turn);
        MPI_Finalize();
        return 0;
    }
    int kind = 0;
    while (kind < KINDS && (argc < 4 || strcmp(argv[1], names[kind])))
        kind++;
    if (kind == KINDS) {
        fprintf(stderr, "usage: mpi COLLECTIVE BUDGET_US BYTES:ITERATIONS...\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    begin();
    for (int i = 3; i < argc; i++) {
        long bytes = 0;
        int iterations = 0;
        if (sscanf(argv[i], "%ld:%d", &bytes, &iterations) == 2 && iterations > 0)
            measure(kind, atof(argv[2]), bytes, iterations);
    }
    MPI_Finalize();
    return 0;
}

/* One rank of MPI, or with CCL defined (as C++) of oneCCL over it: Allreduce (sum) of f32, timed; rank 0 prints a line of JSON.
 * Usage: mpi BYTES WARMUP ITERATIONS IN_PLACE (0 or 1), under mpirun. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef CCL
#include <oneapi/ccl.hpp>
static ccl::communicator *communicator;

static void begin(int rank, int ranks)
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

static void reduce(const float *input, float *output, int count)
{
    ccl::allreduce(input, output, (size_t)count, ccl::reduction::sum, *communicator).wait();
}
#else
static void begin(int rank, int ranks) { (void)rank, (void)ranks; }

static void reduce(const float *input, float *output, int count)
{
    const void *from = input == output ? MPI_IN_PLACE : (const void *)input;
    MPI_Allreduce(from, output, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}
#endif

int main(int argc, char **argv)
{
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 5) {
        fprintf(stderr, "usage: mpi BYTES WARMUP ITERATIONS IN_PLACE\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    begin(rank, ranks);
    int count = atoi(argv[1]) / 4, warmup = atoi(argv[2]), iterations = atoi(argv[3]), in_place = atoi(argv[4]);
    size_t room = ((size_t)count * 4 + 4095) / 4096 * 4096;
    float *output = (float *)aligned_alloc(4096, room);
    float *input = in_place ? output : (float *)aligned_alloc(4096, room);
    double *times = (double *)malloc(sizeof(double) * (size_t)(iterations + 1));
    if (!output || !input || !times)
        MPI_Abort(MPI_COMM_WORLD, 3);
    for (int i = 0; i < count; i++)
        output[i] = input[i] = (float)(rank + 1);
    reduce(input, output, count);
    long wrong = 0;
    for (int i = 0; i < count; i++)
        wrong += output[i] != (float)(ranks * (ranks + 1) / 2);
    /* Zeros stay zeros, however often they are added. */
    for (int i = 0; i < count; i++)
        output[i] = input[i] = 0.0f;
    for (int i = 0; i < warmup; i++)
        reduce(input, output, count);
    MPI_Barrier(MPI_COMM_WORLD);
    for (int i = 0; i < iterations; i++) {
        double began = MPI_Wtime();
        reduce(input, output, count);
        times[i] = (MPI_Wtime() - began) * 1e6;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) {
        printf("{\"times_us\": [");
        for (int i = 0; i < iterations; i++)
            printf("%s%.3f", i ? ", " : "", times[i]);
        printf("], \"wrong\": %ld}\n", wrong);
    }
    MPI_Finalize();
    return 0;
}

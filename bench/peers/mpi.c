/* One rank of MPI: Allreduce (sum) of f32, timed; rank 0 prints a line of JSON.
 * Usage: mpi BYTES WARMUP ITERATIONS IN_PLACE (0 or 1), under mpirun. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

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
    int count = atoi(argv[1]) / 4, warmup = atoi(argv[2]), iterations = atoi(argv[3]), in_place = atoi(argv[4]);
    float *output = aligned_alloc(4096, ((size_t)count * 4 + 4095) / 4096 * 4096);
    float *input = in_place ? output : aligned_alloc(4096, ((size_t)count * 4 + 4095) / 4096 * 4096);
    double *times = malloc(sizeof(double) * (size_t)(iterations + 1));
    if (!output || !input || !times)
        MPI_Abort(MPI_COMM_WORLD, 3);
    const void *from = in_place ? MPI_IN_PLACE : input;
    for (int i = 0; i < count; i++)
        output[i] = input[i] = (float)(rank + 1);
    MPI_Allreduce(from, output, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    long wrong = 0;
    for (int i = 0; i < count; i++)
        wrong += output[i] != (float)(ranks * (ranks + 1) / 2);
    /* Zeros stay zeros, however often they are added. */
    for (int i = 0; i < count; i++)
        output[i] = input[i] = 0.0f;
    for (int i = 0; i < warmup; i++)
        MPI_Allreduce(from, output, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Barrier(MPI_COMM_WORLD);
    for (int i = 0; i < iterations; i++) {
        double began = MPI_Wtime();
        MPI_Allreduce(from, output, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
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

/*
 * A program of MPI as anybody would write it: it knows nothing of the library that is preloaded into it, and checks the result of each
 * collective. argv[1] names the case.
 */
#include <complex.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT 1000
#define MOST 16

static int rank = -1, ranks;

static void fail(int line, const char *what, long at) {
    fprintf(stderr, "rank %d, line %d: %s at %ld\n", rank, line, what, at);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(EXIT_FAILURE);
}

#define CHECK(holds) ((holds) ? (void)0 : fail(__LINE__, #holds, -1))
#define CHECK_AT(holds, at) ((holds) ? (void)0 : fail(__LINE__, #holds, (long)(at)))
#define OK(call) CHECK((call) == MPI_SUCCESS)

/* What a rank contributes, as a number that all types have. */
static int value(int of, int i) { return (of * 7 + i * 3) % 11 + 1; }

static int sum(int i) {
    int all = 0;
    for (int of = 0; of < ranks; of++)
        all += value(of, i);
    return all;
}

#define REDUCE(type, dtype, op, start, step)                                                                           \
    do {                                                                                                               \
        static type in[COUNT], out[COUNT];                                                                             \
        for (int i = 0; i < COUNT; i++)                                                                                \
            in[i] = (type)value(rank, i), out[i] = 0;                                                                  \
        OK(MPI_Allreduce(in, out, COUNT, dtype, op, MPI_COMM_WORLD));                                                  \
        for (int i = 0; i < COUNT; i++) {                                                                              \
            type all = (type)(start);                                                                                  \
            for (int of = 0; of < ranks; of++) {                                                                       \
                type one = (type)value(of, i);                                                                         \
                step;                                                                                                  \
            }                                                                                                          \
            CHECK_AT(out[i] == all && in[i] == (type)value(rank, i), i);                                               \
        }                                                                                                              \
    } while (0)

static void reductions(void) {
    REDUCE(int, MPI_INT, MPI_SUM, 0, all += one);
    REDUCE(double, MPI_DOUBLE, MPI_SUM, 0, all += one);
    REDUCE(float, MPI_FLOAT, MPI_MAX, 0, all = one > all ? one : all);
    REDUCE(int64_t, MPI_INT64_T, MPI_MIN, 100, all = one < all ? one : all);
    REDUCE(long, MPI_LONG, MPI_PROD, 1, all *= one);
    REDUCE(unsigned char, MPI_UNSIGNED_CHAR, MPI_BOR, 0, all |= one);
    REDUCE(unsigned short, MPI_UNSIGNED_SHORT, MPI_BAND, 0xffff, all &= one);
    REDUCE(unsigned long long, MPI_UNSIGNED_LONG_LONG, MPI_BXOR, 0, all ^= one);
    REDUCE(float complex, MPI_C_FLOAT_COMPLEX, MPI_SUM, 0, all += one);
}

static void add_twice(void *in, void *inout, int *count, MPI_Datatype *type) {
    (void)type;
    for (int i = 0; i < *count; i++)
        ((int *)inout)[i] += ((int *)in)[i];
}

/* Types and operations that the provider does not reduce: the MPI does it, and it is right all the same. */
static void others(void) {
    REDUCE(long double, MPI_LONG_DOUBLE, MPI_SUM, 0, all += one);
    REDUCE(int, MPI_INT, MPI_LAND, 1, all = all && one);
    MPI_Op own;
    OK(MPI_Op_create(add_twice, 1, &own));
    REDUCE(int, MPI_INT, own, 0, all += one);
    OK(MPI_Op_free(&own));
    struct {
        double value;
        int at;
    } in = {value(rank, 0), rank}, out;
    OK(MPI_Allreduce(&in, &out, 1, MPI_DOUBLE_INT, MPI_MAXLOC, MPI_COMM_WORLD));
    for (int of = 0; of < ranks; of++)
        CHECK(out.value >= value(of, 0) && value(out.at, 0) == (int)out.value);
    int none = 0;
    OK(MPI_Allreduce(&none, &none + 0, 0, MPI_INT, MPI_SUM, MPI_COMM_WORLD));
}

static void collectives(MPI_Comm comm) {
    int own, all;
    static int in[COUNT * MOST], out[COUNT * MOST];
    OK(MPI_Comm_rank(comm, &own));
    OK(MPI_Comm_size(comm, &all));
    CHECK(all <= MOST);
    for (int root = 0; root < all; root++) {
        for (int i = 0; i < COUNT; i++)
            out[i] = own == root ? value(root, i) : -1;
        OK(MPI_Bcast(out, COUNT, MPI_INT, root, comm));
        for (int i = 0; i < COUNT; i++)
            CHECK_AT(out[i] == value(root, i), i);
        for (int i = 0; i < COUNT; i++)
            in[i] = value(own, i), out[i] = -1;
        OK(MPI_Reduce(in, own == root ? out : NULL, COUNT, MPI_INT, MPI_SUM, root, comm));
        for (int i = 0; i < COUNT; i++) {
            int expected = 0;
            for (int of = 0; of < all; of++)
                expected += value(of, i);
            CHECK_AT(out[i] == (own == root ? expected : -1), i);
        }
        /* At other roots MPICH 4.0.2 of Debian 12 crashes, without any other library. */
        if (root == 0)
            OK(MPI_Reduce(own == 0 ? MPI_IN_PLACE : in, in, COUNT, MPI_INT, MPI_MAX, 0, comm));
        for (int i = 0; own == 0 && root == 0 && i < COUNT; i++)
            for (int of = 0; of < all; of++)
                CHECK_AT(in[i] >= value(of, i), i);
    }
    for (int i = 0; i < COUNT; i++)
        in[i] = value(own, i);
    OK(MPI_Allgather(in, COUNT, MPI_INT, out, COUNT, MPI_INT, comm));
    for (int of = 0; of < all; of++)
        for (int i = 0; i < COUNT; i++)
            CHECK_AT(out[of * COUNT + i] == value(of, i), i);
    memset(out, 0, sizeof out);
    memcpy(out + own * COUNT, in, COUNT * sizeof *in);
    OK(MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, out, COUNT, MPI_INT, comm));
    for (int of = 0; of < all; of++)
        for (int i = 0; i < COUNT; i++)
            CHECK_AT(out[of * COUNT + i] == value(of, i), i);
    for (int to = 0; to < all; to++)
        for (int i = 0; i < COUNT; i++)
            in[to * COUNT + i] = value(own, i) * 100 + to;
    OK(MPI_Alltoall(in, COUNT, MPI_INT, out, COUNT, MPI_INT, comm));
    for (int of = 0; of < all; of++)
        for (int i = 0; i < COUNT; i++)
            CHECK_AT(out[of * COUNT + i] == value(of, i) * 100 + own, i);
    OK(MPI_Alltoall(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, in, COUNT, MPI_INT, comm));
    CHECK(memcmp(in, out, (size_t)(all * COUNT) * sizeof *in) == 0);

    /* Rank r sends s + 1 numbers to rank s, with a gap between blocks, and the others receive r's in reverse order. */
    int counts[MOST], places[MOST], received[MOST], into[MOST];
    for (int to = 0; to < all; to++) {
        counts[to] = own == 1 ? 0 : to + 1, places[to] = to * (MOST + 3);
        received[to] = to == 1 ? 0 : own + 1, into[to] = (all - 1 - to) * (MOST + 1);
        for (int i = 0; i < counts[to]; i++)
            in[places[to] + i] = own * 1000 + to * 10 + i;
    }
    memset(out, 0xff, sizeof out);
    OK(MPI_Alltoallv(in, counts, places, MPI_INT, out, received, into, MPI_INT, comm));
    for (int of = 0; of < all; of++) {
        for (int i = 0; i < received[of]; i++)
            CHECK_AT(out[into[of] + i] == of * 1000 + own * 10 + i, of);
        CHECK_AT(out[into[of] + received[of]] == -1, of);
    }
    for (int of = 0, at = 0; of < all; of++)
        received[of] = of * 5, into[of] = at, at += of * 5 + 2;
    for (int i = 0; i < own * 5; i++)
        in[i] = value(own, i);
    OK(MPI_Allgatherv(in, own * 5, MPI_INT, out, received, into, MPI_INT, comm));
    for (int of = 0; of < all; of++)
        for (int i = 0; i < received[of]; i++)
            CHECK_AT(out[into[of] + i] == value(of, i), i);

    for (int uneven = 0; uneven < 2; uneven++)
        for (int in_place = 0; in_place < 2; in_place++) {
            int begin = 0, total = 0;
            for (int of = 0; of < all; of++) {
                counts[of] = uneven ? of * 3 : 50;
                begin += of < own ? counts[of] : 0;
                total += counts[of];
            }
            for (int i = 0; i < total; i++)
                in[i] = value(own, i), out[i] = -1;
            if (in_place)
                OK(MPI_Reduce_scatter(MPI_IN_PLACE, in, counts, MPI_INT, MPI_SUM, comm));
            else
                OK(MPI_Reduce_scatter(in, out, counts, MPI_INT, MPI_SUM, comm));
            for (int i = 0; i < counts[own]; i++) {
                int expected = 0;
                for (int of = 0; of < all; of++)
                    expected += value(of, begin + i);
                CHECK_AT((in_place ? in : out)[i] == expected, i);
            }
        }
    for (int i = 0; i < all * COUNT; i++)
        in[i] = value(own, i);
    OK(MPI_Reduce_scatter_block(in, out, COUNT, MPI_INT, MPI_SUM, comm));
    for (int i = 0; i < COUNT; i++) {
        int expected = 0;
        for (int of = 0; of < all; of++)
            expected += value(of, own * COUNT + i);
        CHECK_AT(out[i] == expected, i);
    }
    OK(MPI_Barrier(comm));
}

/* Types with gaps, at one rank and not at the other. */
static void layouts(void) {
    MPI_Datatype column;
    static int matrix[COUNT][3], plain[COUNT * MOST];
    OK(MPI_Type_vector(COUNT, 1, 3, MPI_INT, &column));
    OK(MPI_Type_commit(&column));
    for (int i = 0; i < COUNT; i++)
        matrix[i][0] = -1, matrix[i][1] = rank == 0 ? value(0, i) : -1, matrix[i][2] = -2, plain[i] = -1;
    if (rank == 0)
        OK(MPI_Bcast(&matrix[0][1], 1, column, 0, MPI_COMM_WORLD));
    else if (rank % 2)
        OK(MPI_Bcast(plain, COUNT, MPI_INT, 0, MPI_COMM_WORLD));
    else
        OK(MPI_Bcast(&matrix[0][1], 1, column, 0, MPI_COMM_WORLD));
    for (int i = 0; i < COUNT; i++) {
        CHECK_AT((rank % 2 ? plain[i] : matrix[i][1]) == value(0, i), i);
        CHECK_AT(matrix[i][0] == -1 && matrix[i][2] == -2, i);
    }
    for (int i = 0; i < COUNT; i++)
        matrix[i][1] = value(rank, i);
    MPI_Request request;
    OK(MPI_Iallgather(&matrix[0][1], 1, column, plain, COUNT, MPI_INT, MPI_COMM_WORLD, &request));
    OK(MPI_Type_free(&column));
    OK(MPI_Wait(&request, MPI_STATUS_IGNORE));
    for (int of = 0; of < ranks; of++)
        for (int i = 0; i < COUNT; i++)
            CHECK_AT(plain[of * COUNT + i] == value(of, i), i);
}

static void communicators(void) {
    MPI_Comm half, twice, none;
    OK(MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half));
    collectives(half);
    OK(MPI_Comm_dup(half, &twice));
    OK(MPI_Comm_free(&half));
    collectives(twice);
    OK(MPI_Comm_free(&twice));
    OK(MPI_Comm_split(MPI_COMM_WORLD, rank ? MPI_UNDEFINED : 0, 0, &none));
    if (rank == 0) {
        int one = 5;
        OK(MPI_Allreduce(MPI_IN_PLACE, &one, 1, MPI_INT, MPI_SUM, none));
        CHECK(one == 5);
        OK(MPI_Comm_free(&none));
    }
    for (int i = 0; i < 3; i++) {
        int one = 1;
        OK(MPI_Comm_dup(MPI_COMM_WORLD, &twice));
        OK(MPI_Allreduce(MPI_IN_PLACE, &one, 1, MPI_INT, MPI_SUM, twice));
        CHECK(one == ranks);
        OK(MPI_Comm_free(&twice));
    }
    /* Between the even and the odd ranks: the MPI's own. */
    MPI_Comm between;
    int mine = rank, theirs = 0, expected = 0;
    OK(MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half));
    OK(MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - rank % 2, 7, &between));
    OK(MPI_Allreduce(&mine, &theirs, 1, MPI_INT, MPI_SUM, between));
    for (int of = 1 - rank % 2; of < ranks; of += 2)
        expected += of;
    CHECK(theirs == expected);
    OK(MPI_Comm_free(&between));
    OK(MPI_Comm_free(&half));
}

static void nonblocking(void) {
    enum { SUMS = 20 };
    static int in[SUMS][COUNT], out[SUMS][COUNT];
    MPI_Request requests[SUMS + 2];
    MPI_Status statuses[SUMS + 2];
    int message = -1, next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks, flag = 0, index;
    for (int round = 0; round < 4; round++) {
        for (int n = 0; n < SUMS; n++) {
            for (int i = 0; i < COUNT; i++)
                in[n][i] = value(rank, i) + n, out[n][i] = -1;
            OK(MPI_Iallreduce(in[n], out[n], COUNT, MPI_INT, MPI_SUM, MPI_COMM_WORLD, &requests[n]));
            CHECK(requests[n] != MPI_REQUEST_NULL);
        }
        OK(MPI_Irecv(&message, 1, MPI_INT, before, round, MPI_COMM_WORLD, &requests[SUMS]));
        OK(MPI_Isend(&rank, 1, MPI_INT, next, round, MPI_COMM_WORLD, &requests[SUMS + 1]));
        if (round == 0)
            OK(MPI_Waitall(SUMS + 2, requests, statuses));
        for (int n = 0; round == 1 && n < SUMS + 2; n++) {
            OK(MPI_Waitany(SUMS + 2, requests, &index, &statuses[0]));
            CHECK(index >= 0 && index < SUMS + 2 && requests[index] == MPI_REQUEST_NULL);
        }
        for (int ended = 0, some[SUMS + 2], found; round == 2 && ended < SUMS + 2; ended += found) {
            OK(MPI_Waitsome(SUMS + 2, requests, &found, some, statuses));
            CHECK(found > 0);
        }
        for (flag = 0; round == 3 && !flag;)
            OK(MPI_Testall(SUMS + 2, requests, &flag, MPI_STATUSES_IGNORE));
        CHECK(message == before);
        for (int n = 0; n < SUMS; n++) {
            CHECK(requests[n] == MPI_REQUEST_NULL);
            for (int i = 0; i < COUNT; i++)
                CHECK_AT(out[n][i] == sum(i) + n * ranks, i);
        }
    }
    OK(MPI_Waitany(SUMS, requests, &index, &statuses[0]));
    CHECK(index == MPI_UNDEFINED);
    OK(MPI_Ibarrier(MPI_COMM_WORLD, &requests[0]));
    for (flag = 0; !flag;)
        OK(MPI_Request_get_status(requests[0], &flag, &statuses[0]));
    for (flag = 0; !flag;)
        OK(MPI_Test(&requests[0], &flag, &statuses[0]));
    static int many[COUNT * MOST];
    for (int i = 0; i < COUNT; i++)
        in[0][i] = value(rank, i), out[0][i] = rank ? -1 : value(0, i);
    OK(MPI_Ibcast(out[0], COUNT, MPI_INT, 0, MPI_COMM_WORLD, &requests[0]));
    OK(MPI_Iallgather(in[0], COUNT, MPI_INT, many, COUNT, MPI_INT, MPI_COMM_WORLD, &requests[1]));
    OK(MPI_Ireduce(in[0], out[1], COUNT, MPI_INT, MPI_SUM, ranks - 1, MPI_COMM_WORLD, &requests[2]));
    OK(MPI_Waitall(3, requests, MPI_STATUSES_IGNORE));
    for (int i = 0; i < COUNT; i++)
        CHECK_AT(out[0][i] == value(0, i) && (rank < ranks - 1 || out[1][i] == sum(i)), i);
    for (int i = 0; i < COUNT * ranks; i++)
        CHECK_AT(many[i] == value(i / COUNT, i % COUNT), i);
    /* Blocks that differ in size: block r has r + 1 numbers. */
    static int blocks[COUNT * MOST], varied[COUNT], swapped[COUNT], uneven[COUNT], block[COUNT];
    int counts[MOST], places[MOST], received[MOST], into[MOST];
    for (int of = 0, at = 0; of < ranks; of++) {
        counts[of] = of + 1, places[of] = at, at += of + 1;
        received[of] = rank + 1, into[of] = of * (rank + 1);
        for (int i = 0; i < COUNT; i++)
            blocks[of * COUNT + i] = value(rank, i) * 100 + of;
    }
    OK(MPI_Iallgatherv(in[0], rank + 1, MPI_INT, varied, counts, places, MPI_INT, MPI_COMM_WORLD, &requests[0]));
    OK(MPI_Ialltoall(blocks, COUNT, MPI_INT, many, COUNT, MPI_INT, MPI_COMM_WORLD, &requests[1]));
    OK(MPI_Ialltoallv(in[0], counts, places, MPI_INT, swapped, received, into, MPI_INT, MPI_COMM_WORLD, &requests[2]));
    OK(MPI_Ireduce_scatter(in[0], uneven, counts, MPI_INT, MPI_SUM, MPI_COMM_WORLD, &requests[3]));
    OK(MPI_Ireduce_scatter_block(blocks, block, COUNT, MPI_INT, MPI_SUM, MPI_COMM_WORLD, &requests[4]));
    OK(MPI_Waitall(5, requests, MPI_STATUSES_IGNORE));
    for (int of = 0; of < ranks; of++) {
        for (int i = 0; i < counts[of]; i++)
            CHECK_AT(varied[places[of] + i] == value(of, i), i);
        for (int i = 0; i < received[of]; i++)
            CHECK_AT(swapped[into[of] + i] == value(of, places[rank] + i), i);
        for (int i = 0; i < COUNT; i++)
            CHECK_AT(many[of * COUNT + i] == value(of, i) * 100 + rank, i);
    }
    for (int i = 0; i < counts[rank]; i++)
        CHECK_AT(uneven[i] == sum(places[rank] + i), i);
    for (int i = 0; i < COUNT; i++)
        CHECK_AT(block[i] == sum(i) * 100 + ranks * rank, i);
    /* In place, by a type with gaps, and nothing for the rank itself. */
    MPI_Datatype spaced;
    OK(MPI_Type_create_resized(MPI_INT, 0, 2 * sizeof(int), &spaced));
    OK(MPI_Type_commit(&spaced));
    for (int of = 0; of < ranks; of++) {
        counts[of] = abs(rank - of), places[of] = of * MOST;
        for (int i = 0; i < 2 * MOST; i++)
            many[2 * places[of] + i] = i % 2 ? -1 : value(rank, i) * 100 + of;
    }
    OK(MPI_Ialltoallv(MPI_IN_PLACE, counts, places, spaced, many, counts, places, spaced, MPI_COMM_WORLD, &requests[0]));
    OK(MPI_Wait(&requests[0], &statuses[0]));
    OK(MPI_Type_free(&spaced));
    for (int of = 0; of < ranks; of++)
        for (int i = 0; i < 2 * MOST; i++) {
            int moved = value(of, i) * 100 + rank, own = value(rank, i) * 100 + of;
            CHECK_AT(many[2 * places[of] + i] == (i % 2 ? -1 : i < 2 * counts[of] ? moved : own), i);
        }
    /* Each rank in turn has a number of every other, and sends nothing, which lies nowhere. */
    for (int to = 0; to < ranks; to++) {
        for (int of = 0; of < ranks; of++) {
            counts[of] = rank != to && of == to, places[of] = rank == to ? -1 : 0;
            received[of] = rank == to && of != to, into[of] = of, swapped[of] = -1;
        }
        OK(MPI_Ialltoallv(rank == to ? NULL : &rank, counts, places, MPI_INT, swapped, received, into, MPI_INT,
                          MPI_COMM_WORLD, &requests[0]));
        OK(MPI_Wait(&requests[0], &statuses[0]));
        for (int of = 0; of < ranks; of++)
            CHECK_AT(swapped[of] == (received[of] ? of : -1), of);
    }
    /* The first collective of a communicator. */
    MPI_Comm twice;
    OK(MPI_Comm_dup(MPI_COMM_WORLD, &twice));
    OK(MPI_Iallreduce(in[0], out[0], COUNT, MPI_INT, MPI_SUM, twice, &requests[0]));
    OK(MPI_Wait(&requests[0], &statuses[0]));
    CHECK(out[0][5] == sum(5));
    OK(MPI_Comm_free(&twice));
}

/* A rank that waits in a collective goes on sending what another needs before it calls. */
static void progress(void) {
    enum { LARGE = 1 << 22 };
    int *buffer = malloc(LARGE * sizeof *buffer), one = 1;
    MPI_Request request = MPI_REQUEST_NULL;
    CHECK(buffer);
    for (int i = 0; i < LARGE; i++)
        buffer[i] = rank == 0 ? i : -1;
    if (rank == 0)
        OK(MPI_Isend(buffer, LARGE, MPI_INT, 1, 0, MPI_COMM_WORLD, &request));
    if (rank == 1) {
        OK(MPI_Recv(buffer, LARGE, MPI_INT, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        for (int i = 0; i < LARGE; i++)
            CHECK_AT(buffer[i] == i, i);
    }
    OK(MPI_Allreduce(MPI_IN_PLACE, &one, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD));
    CHECK(one == ranks);
    OK(MPI_Wait(&request, MPI_STATUS_IGNORE));
    free(buffer);
}

/* Larger than what is staged at once. */
static void large(void) {
    enum { LARGE = 11 << 20 };
    int *in = malloc(LARGE * sizeof *in), *out = malloc(LARGE * sizeof *out);
    CHECK(in && out);
    for (int i = 0; i < LARGE; i++)
        in[i] = rank + i % 1000;
    OK(MPI_Allreduce(in, out, LARGE, MPI_INT, MPI_SUM, MPI_COMM_WORLD));
    for (int i = 0; i < LARGE; i++)
        CHECK_AT(out[i] == ranks * (i % 1000) + ranks * (ranks - 1) / 2, i);
    int block = LARGE / ranks;
    OK(MPI_Alltoall(in, block, MPI_INT, out, block, MPI_INT, MPI_COMM_WORLD));
    for (int of = 0; of < ranks; of++)
        for (int i = 0; i < block; i++)
            CHECK_AT(out[of * block + i] == of + (rank * block + i) % 1000, i);
    OK(MPI_Reduce_scatter_block(MPI_IN_PLACE, in, block, MPI_INT, MPI_SUM, MPI_COMM_WORLD));
    for (int i = 0; i < block; i++)
        CHECK_AT(in[i] == ranks * ((rank * block + i) % 1000) + ranks * (ranks - 1) / 2, i);
    MPI_Request request;
    OK(MPI_Ibcast(out, LARGE, MPI_INT, 0, MPI_COMM_WORLD, &request));
    OK(MPI_Wait(&request, MPI_STATUS_IGNORE));
    CHECK(out[0] == 0);
    /* One block is large, and what follows it at its receiver is not. */
    int counts[MOST], places[MOST], received[MOST], into[MOST];
    for (int of = 0; of < ranks; of++) {
        counts[of] = rank == 0 && of == 1 ? LARGE / 2 : COUNT, places[of] = of * COUNT;
        received[of] = rank == 1 && of == 0 ? LARGE / 2 : COUNT, into[of] = of * (LARGE / 2);
    }
    for (int i = 0; i < LARGE; i++)
        in[i] = rank * 1000 + i % 1000, out[i] = -1;
    OK(MPI_Ialltoallv(in, counts, places, MPI_INT, out, received, into, MPI_INT, MPI_COMM_WORLD, &request));
    OK(MPI_Wait(&request, MPI_STATUS_IGNORE));
    for (int of = 0; of < ranks; of++)
        for (int i = 0; i < received[of]; i++)
            CHECK_AT(out[into[of] + i] == of * 1000 + (rank * COUNT + i) % 1000, i);
    free(in);
    free(out);
}

/* Ranks that call different things have an error each, and the MPI goes on. */
static void mistakes(void) {
    static int in[COUNT], out[COUNT];
    MPI_Comm own;
    for (int nonblocking = 0; nonblocking < 2; nonblocking++) {
        int result, class = MPI_SUCCESS, count = rank == 0 ? COUNT : COUNT / 2;
        OK(MPI_Comm_dup(MPI_COMM_WORLD, &own));
        OK(MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN));
        OK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
        OK(MPI_Barrier(own));
        /* A failure ends what a slow rank has not heard the end of: all have ended the barrier. */
        OK(MPI_Barrier(MPI_COMM_WORLD));
        if (nonblocking) {
            MPI_Request request;
            OK(MPI_Iallreduce(in, out, count, MPI_INT, MPI_SUM, own, &request));
            result = MPI_Wait(&request, MPI_STATUS_IGNORE);
            CHECK(request == MPI_REQUEST_NULL);
        } else
            result = MPI_Allreduce(in, out, count, MPI_INT, MPI_SUM, own);
        CHECK(result != MPI_SUCCESS);
        OK(MPI_Error_class(result, &class));
        CHECK(class == MPI_ERR_OTHER);
        CHECK(MPI_Barrier(own) != MPI_SUCCESS);
        OK(MPI_Comm_free(&own));
    }
    OK(MPI_Barrier(MPI_COMM_WORLD));
}

int main(int count, char **arguments) {
    int provided;
    const char *name = count > 1 ? arguments[1] : "";
    if (strcmp(name, "threads") == 0) {
        OK(MPI_Init_thread(&count, &arguments, MPI_THREAD_MULTIPLE, &provided));
        name = "nonblocking";
    } else
        OK(MPI_Init(&count, &arguments));
    OK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    OK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
    CHECK(ranks >= 2 && ranks <= MOST);
    if (strcmp(name, "collectives") == 0)
        reductions(), collectives(MPI_COMM_WORLD), layouts();
    else if (strcmp(name, "others") == 0)
        others();
    else if (strcmp(name, "communicators") == 0)
        communicators();
    else if (strcmp(name, "nonblocking") == 0)
        nonblocking();
    else if (strcmp(name, "mistakes") == 0)
        mistakes();
    else if (strcmp(name, "large") == 0)
        progress(), large();
    else
        CHECK(!"a case");
    OK(MPI_Finalize());
    printf("rank %d of %d: %s is right\n", rank, ranks, name);
    return EXIT_SUCCESS;
}

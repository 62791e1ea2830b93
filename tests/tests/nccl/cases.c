/* What a program built for NCCL gets from the library with its ABI on the host's memory, case by case: argv[1] names one. */
#include "program.h"

static float in[MOST * COUNT], out[MOST * COUNT];

/* What a rank has at a place. */
static float value(int of, int at) {
    return (float)(of * 1000 + at);
}

static void fill(void) {
    for (int at = 0; at < MOST * COUNT; at++) {
        in[at] = value(rank, at);
        out[at] = -1;
    }
}

static float sum(int at) {
    float all = 0;
    for (int of = 0; of < ranks; of++)
        all += value(of, at);
    return all;
}

static void collectives(void) {
    ncclComm_t comm = join();
    int last = ranks - 1;

    fill();
    OK(ncclAllReduce(in, out, COUNT, ncclFloat32, ncclSum, comm, NULL));
    for (int at = 0; at < COUNT; at++)
        CHECK(out[at] == sum(at) && in[at] == value(rank, at));
    CHECK(out[COUNT] == -1);
    OK(ncclAllReduce(in, in, COUNT, ncclFloat32, ncclMax, comm, NULL));
    for (int at = 0; at < COUNT; at++)
        CHECK(in[at] == value(last, at));

    fill();
    OK(ncclAllReduce(in, out, COUNT, ncclFloat32, ncclAvg, comm, NULL));
    CHECK(out[7] == sum(7) / (float)ranks);
    int op = -1;
    float factor = (float)(rank + 1), scaled = 0;
    OK(ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat32, 1, comm));
    OK(ncclAllReduce(in, out, COUNT, ncclFloat32, op, comm, NULL));
    for (int of = 0; of < ranks; of++)
        scaled += (float)(of + 1) * value(of, 3);
    CHECK(out[3] == scaled);
    OK(ncclRedOpDestroy(op, comm));
    FAILS(ncclAllReduce(in, out, COUNT, ncclFloat32, op, comm, NULL), ncclInvalidArgument, "no reduction");

    int64_t whole[2] = {rank, -rank}, times = rank + 1, product = 0, products = 0;
    OK(ncclRedOpCreatePreMulSum(&op, &times, ncclInt64, 1, comm));
    OK(ncclAllReduce(&times, &product, 1, ncclInt64, op, comm, NULL));
    for (int64_t of = 1; of <= ranks; of++)
        products += of * of;
    CHECK(product == products);
    OK(ncclRedOpDestroy(op, comm));
    OK(ncclAllReduce(whole, whole, 2, ncclInt64, ncclMin, comm, NULL));
    CHECK(whole[0] == 0 && whole[1] == -last);

    fill();
    OK(ncclReduce(in, out, COUNT, ncclFloat32, ncclSum, last, comm, NULL));
    CHECK(out[9] == (rank == last ? sum(9) : -1));
    OK(ncclBroadcast(rank == last ? in : NULL, out, COUNT, ncclFloat32, last, comm, NULL));
    CHECK(out[11] == value(last, 11));
    OK(ncclBcast(in, COUNT, ncclFloat32, 0, comm, NULL));
    CHECK(in[11] == value(0, 11));

    fill();
    OK(ncclReduceScatter(in, out, COUNT, ncclFloat32, ncclSum, comm, NULL));
    CHECK(out[5] == sum(rank * COUNT + 5) && out[COUNT] == -1);
    OK(ncclAllGather(in, out, COUNT, ncclFloat32, comm, NULL));
    for (int of = 0; of < ranks; of++)
        CHECK(out[of * COUNT + 5] == value(of, 5));
    OK(ncclAlltoAll(in, out, COUNT, ncclFloat32, comm, NULL));
    for (int of = 0; of < ranks; of++)
        CHECK(out[of * COUNT + 5] == value(of, rank * COUNT + 5));
    OK(ncclGather(in, out, 10, ncclFloat32, 0, comm, NULL));
    for (int of = 0; of < ranks && rank == 0; of++)
        CHECK(out[of * 10 + 5] == value(of, 5));
    OK(ncclScatter(in, out, 10, ncclFloat32, last, comm, NULL));
    CHECK(out[5] == value(last, rank * 10 + 5));

    /* To all and from all, in one group. */
    fill();
    OK(ncclGroupStart());
    OK(ncclGroupStart());
    for (int other = 0; other < ranks; other++) {
        OK(ncclSend(in + other * COUNT, COUNT, ncclFloat32, other, comm, NULL));
        OK(ncclRecv(out + other * COUNT, COUNT, ncclFloat32, other, comm, NULL));
    }
    OK(ncclGroupEnd());
    CHECK(out[0] == -1);
    OK(ncclAllReduce(&factor, &scaled, 1, ncclFloat32, ncclSum, comm, NULL));
    OK(ncclGroupEnd());
    for (int of = 0; of < ranks; of++)
        CHECK(out[of * COUNT + 5] == value(of, rank * COUNT + 5));
    CHECK(scaled == (float)(ranks * (ranks + 1) / 2));

    /* More operations at once than the rings have room for. */
    OK(ncclGroupStart());
    for (int at = 0; at < 1500; at++)
        OK(ncclAllReduce(in + at, out + at, 1, ncclFloat32, ncclSum, comm, NULL));
    OK(ncclGroupEnd());
    for (int at = 0; at < 1500; at++)
        CHECK(out[at] == sum(at));

    OK(ncclAllReduce(NULL, NULL, 0, ncclFloat32, ncclSum, comm, NULL));
    OK(ncclCommFinalize(comm));
    OK(ncclCommDestroy(comm));
}

static void one_process(void) {
    ncclComm_t comms[3];
    int devices[3] = {4, 2, 0}, found = -1;
    OK(ncclCommInitAll(comms, 3, devices));
    ranks = 3;
    OK(ncclCommCuDevice(comms[1], &found));
    CHECK(found == 2);
    float each[3] = {1, 2, 4};
    OK(ncclGroupStart());
    for (int at = 0; at < 3; at++)
        OK(ncclAllReduce(each + at, each + at, 1, ncclFloat32, ncclSum, comms[at], NULL));
    OK(ncclGroupEnd());
    CHECK(each[0] == 7 && each[1] == 7 && each[2] == 7);
    for (int at = 0; at < 3; at++)
        OK(ncclCommDestroy(comms[at]));
}

static void parts(void) {
    ncclComm_t comm = join(), half = NULL, none = comm, fewer = NULL;
    int found = -1, members = -1, excluded[1] = {1};
    float each = 1;
    OK(ncclCommSplit(comm, rank % 2, -rank, &half, NULL));
    OK(ncclCommCount(half, &members));
    CHECK(members == (ranks + 1 - rank % 2) / 2);
    OK(ncclCommUserRank(half, &found));
    CHECK(found == members - 1 - rank / 2);
    OK(ncclAllReduce(&each, &each, 1, ncclFloat32, ncclSum, half, NULL));
    CHECK(each == (float)members);
    OK(ncclCommSplit(comm, rank == 0 ? 5 : -1, 0, &none, NULL));
    CHECK((none != NULL) == (rank == 0));
    if (none)
        OK(ncclCommDestroy(none));
    OK(ncclCommDestroy(half));
    if (rank != 1) {
        OK(ncclCommShrink(comm, excluded, 1, &fewer, NULL, 0));
        OK(ncclCommUserRank(fewer, &found));
        CHECK(found == (rank == 0 ? 0 : rank - 1));
        each = 1;
        OK(ncclAllReduce(&each, &each, 1, ncclFloat32, ncclSum, fewer, NULL));
        CHECK(each == (float)(ranks - 1));
        OK(ncclCommDestroy(fewer));
    }
    /* All are there still. */
    each = 1;
    OK(ncclAllReduce(&each, &each, 1, ncclFloat32, ncclSum, comm, NULL));
    CHECK(each == (float)ranks);
    if (rank == 0) {
        /* Who calls the second has ended the first. */
        OK(ncclAllReduce(&each, &each, 1, ncclFloat32, ncclMax, comm, NULL));
        OK(ncclCommAbort(comm));
        return;
    }
    int result;
    do
        result = ncclAllReduce(&each, &each, 1, ncclFloat32, ncclMax, comm, NULL);
    while (result == ncclSuccess);
    CHECK(result == ncclRemoteError && strstr(ncclGetLastError(NULL), "abort"));
    OK(ncclCommGetAsyncError(comm, &found));
    CHECK(found == ncclRemoteError);
    OK(ncclCommDestroy(comm));
}

static void mistakes(void) {
    ncclComm_t comm = join(), gone = comm;
    float each = 1;
    int version = 0, op = -1;
    void *memory = NULL, *handle = NULL;
    OK(ncclGetVersion(&version));
    CHECK(version == 23203);
    FAILS(ncclAllReduce(NULL, &each, 1, ncclFloat32, ncclSum, comm, NULL), ncclInvalidArgument, "NULL");
    FAILS(ncclAllReduce(&each, &each, 1, 99, ncclSum, comm, NULL), ncclInvalidArgument, "element type 99");
    FAILS(ncclAllReduce(&each, &each, 1, ncclFloat32, -3, comm, NULL), ncclInvalidArgument, "no reduction -3");
    FAILS(ncclBcast(&each, 1, ncclFloat32, ranks, comm, NULL), ncclInvalidArgument, "rank 1 of 1");
    FAILS(ncclSend(&each, 1, ncclFloat32, -1, comm, NULL), ncclInvalidArgument, "rank -1");
    FAILS(ncclAllReduce(&each, &each, SIZE_MAX / 2, ncclFloat32, ncclSum, comm, NULL), ncclInvalidArgument, "elements");
    FAILS(ncclAllReduce(&each, &each, 1, ncclFloat32, ncclSum, NULL, NULL), ncclInvalidArgument, "no such");
    FAILS(ncclAllReduce(&each, &each, 1, ncclFloat32, ncclSum, &each, NULL), ncclInvalidArgument, "no such");
    FAILS(ncclRedOpCreatePreMulSum(&op, &(int64_t){INT64_MAX}, ncclInt64, 1, comm), ncclInvalidArgument, "from -2^53 to 2^53");
    FAILS(ncclRedOpDestroy(ncclSum, comm), ncclInvalidArgument, "did not make");
    FAILS(ncclCommSplit(comm, -2, 0, &gone, NULL), ncclInvalidArgument, "color");
    FAILS(ncclCommShrink(comm, (int[]){0}, 1, &gone, NULL, 0), ncclInvalidArgument, "excludes itself");
    FAILS(ncclCommInitRank(&gone, 2, (ncclUniqueId){{0}}, 2), ncclInvalidArgument, "rank 2 of 2");
    FAILS(ncclGroupEnd(), ncclInvalidUsage, "without ncclGroupStart");
    FAILS(ncclCommSuspend(comm, 0), ncclInvalidUsage, "ncclCommSuspend");
    FAILS(ncclMemFree(&each), ncclInvalidArgument, "did not allocate");
    CHECK(strstr(ncclGetErrorString(ncclRemoteError), "remote error"));
    CHECK(strstr(ncclGetErrorString(77), "no result"));

    OK(ncclMemAlloc(&memory, 10));
    CHECK((uintptr_t)memory % 4096 == 0);
    OK(ncclCommRegister(comm, memory, 10, &handle));
    OK(ncclCommDeregister(comm, handle));
    OK(ncclAllReduce(memory, memory, 1, ncclFloat32, ncclSum, comm, NULL));
    OK(ncclMemFree(memory));
    OK(ncclCommDestroy(comm));
    FAILS(ncclCommDestroy(comm), ncclInvalidArgument, "no such");
}

/* As NCCL's initializers make them; of `more` nothing is looked at. */
static void configurations(void) {
    struct {
        size_t size;
        unsigned magic, version;
        int blocking, more[40];
    } config = {sizeof config, 0xcafebeef, 23203, INT_MIN, {0}};
    struct {
        size_t size;
        unsigned magic, version;
        void *extensions;
        int blocks[4];
        const char *selection;
        int forced, policy;
        uint64_t tag;
        void *event;
    } call = {sizeof call, 0xcafebeef, 23203, NULL, {0}, NULL, 1, INT_MIN, 0, NULL};
    ncclComm_t comm = join(), other = NULL;
    ncclUniqueId id = {{7}};
    float each = 1;
    config.blocking = 0;
    OK(ncclCommInitRankConfig(&other, 1, id, 0, &config));
    OK(ncclCommDestroy(other));
    OK(ncclAllReduceConfig(&each, &each, 1, ncclFloat32, ncclSum, comm, NULL, &call));
    OK(ncclAllReduceConfig(&each, &each, 1, ncclFloat32, ncclSum, comm, NULL, NULL));

    config.blocking = 2;
    FAILS(ncclCommInitRankConfig(&other, 1, id, 0, &config), ncclInvalidArgument, "blocking is 2");
    FAILS(ncclCommSplit(comm, 0, 0, &other, &config), ncclInvalidArgument, "blocking is 2");
    config.magic = 0;
    FAILS(ncclCommShrink(comm, (int[]){1}, 1, &other, &config, 0), ncclInvalidArgument, "initializer");
    call.event = &each;
    FAILS(ncclAllReduceConfig(&each, &each, 1, ncclFloat32, ncclSum, comm, NULL, &call), ncclInvalidUsage, "launch");
    /* A release before has no such field. */
    call.size = sizeof call - sizeof call.event;
    OK(ncclAllReduceConfig(&each, &each, 1, ncclFloat32, ncclSum, comm, NULL, &call));
    /* Nothing runs by NCCL's algorithms; who does not insist on one goes on. */
    call.selection = "ring";
    FAILS(ncclAllReduceConfig(&each, &each, 1, ncclFloat32, ncclSum, comm, NULL, &call), ncclInvalidArgument, "\"ring\"");
    call.forced = 0;
    OK(ncclAllReduceConfig(&each, &each, 1, ncclFloat32, ncclSum, comm, NULL, &call));
    call.selection = "";
    call.forced = 1;
    OK(ncclAllReduceConfig(&each, &each, 1, ncclFloat32, ncclSum, comm, NULL, &call));
    call.magic = 0;
    FAILS(ncclAllReduceConfig(&each, &each, 1, ncclFloat32, ncclSum, comm, NULL, &call), ncclInvalidArgument, "initializer");
    CHECK(each == 1);
    OK(ncclCommDestroy(comm));
}

static void no_agent(void) {
    ncclComm_t comm = NULL;
    setenv("HARMONAIZE_SOCKET", "/nowhere", 1);
    FAILS(ncclCommInitRank(&comm, 1, (ncclUniqueId){{1}}, 0), ncclSystemError, "/nowhere");
    CHECK(comm == NULL);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {{"collectives", collectives},
                 {"one_process", one_process},
                 {"parts", parts},
                 {"mistakes", mistakes},
                 {"configurations", configurations},
                 {"no_agent", no_agent}};
    for (size_t at = 0; argc == 2 && at < sizeof cases / sizeof *cases; at++) {
        if (strcmp(cases[at].name, argv[1]) == 0) {
            cases[at].run();
            return EXIT_SUCCESS;
        }
    }
    fprintf(stderr, "no such case\n");
    return EXIT_FAILURE;
}

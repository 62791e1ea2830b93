/*
 * What a program built for NCCL gets on a device's memory, in the order of CUDA's streams, case by case: argv[1] names one. It runs on a GPU
 * as it is.
 */
#include "program.h"
#include "cuda.h"

#define CUDA(call) CHECK((call) == CUDA_SUCCESS)

static CUcontext context;
static CUstream streams[2];
static CUdeviceptr in, out;
/* What is copied to the device, and what comes from there. */
static float *given, *got;
static uint32_t *gates;

static CUdeviceptr device(size_t floats) {
    CUdeviceptr memory = 0;
    CUDA(cuMemAlloc_v2(&memory, floats * sizeof(float)));
    return memory;
}

static void *host(size_t bytes) {
    void *memory = NULL;
    CUDA(cuMemHostAlloc(&memory, bytes, 3));
    return memory;
}

static void open_device(void) {
    CUdevice first;
    CUDA(cuInit(0));
    CUDA(cuDeviceGet(&first, 0));
    CUDA(cuDevicePrimaryCtxRetain(&context, first));
    CUDA(cuCtxSetCurrent(context));
    for (int at = 0; at < 2; at++)
        CUDA(cuStreamCreate(streams + at, 1));
    in = device(MOST * COUNT);
    out = device(MOST * COUNT);
    given = host(MOST * COUNT * sizeof(float));
    got = host(MOST * COUNT * sizeof(float));
    gates = host(4096);
    memset(gates, 0, 4096);
}

static float value(int of, int at) {
    return (float)(of * 1000 + at);
}

static float sum(int at) {
    float all = 0;
    for (int of = 0; of < ranks; of++)
        all += value(of, at);
    return all;
}

static CUdeviceptr at(CUdeviceptr buffer, int place) {
    return buffer + (CUdeviceptr)place * sizeof(float);
}

static void *pointer(CUdeviceptr address) {
    return (void *)(uintptr_t)address;
}

/* Queues that the input is this rank's, and that the output is -1. */
static void fill(CUstream stream) {
    CUDA(cuStreamSynchronize(stream));
    for (int place = 0; place < MOST * COUNT; place++) {
        given[place] = value(rank, place);
        got[place] = -1;
    }
    CUDA(cuMemcpyAsync(out, (uintptr_t)got, MOST * COUNT * sizeof(float), stream));
    CUDA(cuMemcpyAsync(in, (uintptr_t)given, MOST * COUNT * sizeof(float), stream));
}

/* What a buffer holds once the stream has come so far. */
static float *of(CUdeviceptr buffer, CUstream stream) {
    CUDA(cuMemcpyAsync((uintptr_t)got, buffer, MOST * COUNT * sizeof(float), stream));
    CUDA(cuStreamSynchronize(stream));
    return got;
}

static void collectives(void) {
    ncclComm_t comm = join();
    int last = ranks - 1;
    /* The default stream too. */
    CUstream both[2] = {streams[0], NULL};
    for (int turn = 0; turn < 2; turn++) {
        CUstream stream = both[turn];
        fill(stream);
        OK(ncclAllReduce(pointer(in), pointer(out), COUNT, ncclFloat32, ncclSum, comm, stream));
        float *results = of(out, stream);
        for (int place = 0; place < COUNT; place++)
            CHECK(results[place] == sum(place));
        CHECK(results[COUNT] == -1);
        OK(ncclAllReduce(pointer(in), pointer(in), COUNT, ncclFloat32, ncclMax, comm, stream));
        CHECK(of(in, stream)[9] == value(last, 9));
        fill(stream);
        OK(ncclReduce(pointer(in), pointer(out), COUNT, ncclFloat32, ncclSum, last, comm, stream));
        CHECK(of(out, stream)[9] == (rank == last ? sum(9) : -1));
        OK(ncclBroadcast(pointer(in), pointer(out), COUNT, ncclFloat32, last, comm, stream));
        CHECK(of(out, stream)[11] == value(last, 11));
        fill(stream);
        OK(ncclReduceScatter(pointer(in), pointer(out), COUNT, ncclFloat32, ncclSum, comm, stream));
        results = of(out, stream);
        CHECK(results[5] == sum(rank * COUNT + 5) && results[COUNT] == -1);
        OK(ncclAllGather(pointer(in), pointer(out), COUNT, ncclFloat32, comm, stream));
        results = of(out, stream);
        for (int other = 0; other < ranks; other++)
            CHECK(results[other * COUNT + 5] == value(other, 5));
        OK(ncclAlltoAll(pointer(in), pointer(out), COUNT, ncclFloat32, comm, stream));
        results = of(out, stream);
        for (int other = 0; other < ranks; other++)
            CHECK(results[other * COUNT + 5] == value(other, rank * COUNT + 5));
        /* One after the other, without a wait: each has the one before's output. */
        fill(stream);
        OK(ncclAllReduce(pointer(in), pointer(out), COUNT, ncclFloat32, ncclSum, comm, stream));
        OK(ncclAllReduce(pointer(out), pointer(in), COUNT, ncclFloat32, ncclSum, comm, stream));
        OK(ncclGather(pointer(in), pointer(out), 10, ncclFloat32, 0, comm, stream));
        OK(ncclScatter(pointer(out), pointer(in), 10, ncclFloat32, 0, comm, stream));
        CHECK(of(in, stream)[5] == (float)ranks * sum(5));
    }
    /* To all and from all, in one group of two streams. */
    fill(streams[0]);
    CUDA(cuStreamSynchronize(streams[0]));
    OK(ncclGroupStart());
    for (int other = 0; other < ranks; other++) {
        OK(ncclSend(pointer(at(in, other * COUNT)), COUNT, ncclFloat32, other, comm, streams[0]));
        OK(ncclRecv(pointer(at(out, other * COUNT)), COUNT, ncclFloat32, other, comm, streams[1]));
    }
    OK(ncclGroupEnd());
    float *results = of(out, streams[1]);
    for (int other = 0; other < ranks; other++)
        CHECK(results[other * COUNT + 5] == value(other, rank * COUNT + 5));
    /* More than the rings have room for, in a group and one by one. */
    fill(streams[0]);
    OK(ncclGroupStart());
    for (int place = 0; place < 600; place++)
        OK(ncclAllReduce(pointer(at(in, place)), pointer(at(out, place)), 1, ncclFloat32, ncclSum, comm, streams[0]));
    OK(ncclGroupEnd());
    for (int place = 600; place < 1000; place++)
        OK(ncclAllReduce(pointer(at(in, place)), pointer(at(out, place)), 1, ncclFloat32, ncclSum, comm, streams[0]));
    results = of(out, streams[0]);
    for (int place = 0; place < 1000; place++)
        CHECK(results[place] == sum(place));
    /* Pinned memory of the host's goes in order too. */
    given[0] = 1;
    got[0] = 0;
    OK(ncclAllReduce(given, got, 1, ncclFloat32, ncclSum, comm, streams[0]));
    CUDA(cuStreamSynchronize(streams[0]));
    CHECK(got[0] == (float)ranks);
    int found = -1;
    OK(ncclCommGetAsyncError(comm, &found));
    CHECK(found == ncclSuccess);
    OK(ncclCommDestroy(comm));
}

/* Two calls, whose streams come to them in another order at each rank. */
static void order(void) {
    ncclComm_t comm = join();
    CUstream late = streams[1 - rank % 2];
    float alone = 1;
    fill(streams[0]);
    CUDA(cuStreamSynchronize(streams[0]));
    for (int turn = 1; turn <= 20; turn++) {
        CUDA(cuStreamWaitValue32_v2(late, (uintptr_t)gates, (uint32_t)turn, 0));
        OK(ncclAllReduce(pointer(in), pointer(out), COUNT, ncclFloat32, ncclSum, comm, streams[0]));
        OK(ncclAllReduce(pointer(at(in, COUNT)), pointer(at(out, COUNT)), 10, ncclFloat32, ncclMax, comm, streams[1]));
        /* A call returns before its operation has begun. */
        CHECK(cuStreamQuery(late) == CUDA_ERROR_NOT_READY);
        usleep(2000);
        __atomic_store_n(gates, (uint32_t)turn, __ATOMIC_RELEASE);
        /* The host's own memory comes after both. */
        alone = 1;
        OK(ncclAllReduce(&alone, &alone, 1, ncclFloat32, ncclSum, comm, NULL));
        CHECK(alone == (float)ranks);
        CUDA(cuStreamSynchronize(streams[1]));
        float *results = of(out, streams[0]);
        CHECK(results[7] == sum(7) && results[COUNT + 7] == value(ranks - 1, COUNT + 7));
    }
    OK(ncclCommDestroy(comm));
}

static void failures(void) {
    ncclComm_t comm = join();
    float plain[2] = {1, 2};
    void *graph = NULL, *memory = NULL;
    int found = -1;
    FAILS(ncclAllReduce(pointer(in), plain, 2, ncclFloat32, ncclSum, comm, streams[0]), ncclInvalidArgument, "pinned");
    CUDA(cuStreamBeginCapture_v2(streams[0], 0));
    FAILS(ncclAllReduce(pointer(in), pointer(in), 2, ncclFloat32, ncclSum, comm, streams[0]), ncclInvalidUsage, "graph");
    cuStreamEndCapture(streams[0], &graph);
    int op = -1;
    FAILS(ncclRedOpCreatePreMulSum(&op, pointer(in), ncclFloat32, 0, comm), ncclInvalidArgument, "host memory");
    OK(ncclMemAlloc(&memory, 4096));
    CUDA(cuMemcpyAsync((uintptr_t)memory, in, 4096, streams[0]));
    OK(ncclAllReduce(memory, memory, 1024, ncclFloat32, ncclSum, comm, streams[0]));
    CUDA(cuStreamSynchronize(streams[0]));
    OK(ncclMemFree(memory));
    FAILS(ncclMemFree(memory), ncclInvalidArgument, "did not allocate");
    /* An abort lets the streams of all go on. */
    if (rank == 0) {
        OK(ncclAllReduce(pointer(in), pointer(out), COUNT, ncclFloat32, ncclSum, comm, streams[0]));
        CUDA(cuStreamSynchronize(streams[0]));
        OK(ncclCommGetAsyncError(comm, &found));
        CHECK(found == ncclRemoteError);
        OK(ncclCommDestroy(comm));
    } else {
        usleep(300000);
        OK(ncclCommAbort(comm));
    }
}

#ifdef FAKE
int cuTestFail(CUstream stream);

/* A stream that can do nothing any more holds nobody up. */
static void lost(void) {
    ncclComm_t comm = join();
    float alone = 1;
    int found = -1;
    CUDA(cuTestFail(streams[0]));
    OK(ncclAllReduce(pointer(in), pointer(out), COUNT, ncclFloat32, ncclSum, comm, streams[0]));
    OK(ncclAllReduce(&alone, &alone, 1, ncclFloat32, ncclSum, comm, NULL));
    CHECK(alone == (float)ranks);
    OK(ncclCommGetAsyncError(comm, &found));
    CHECK(found == ncclUnhandledCudaError);
    OK(ncclCommDestroy(comm));
    /* What the stream was given is with it for good, so no leaks are looked for. */
    _exit(EXIT_SUCCESS);
}
#endif

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {{"collectives", collectives},
                 {"order", order},
                 {"failures", failures},
#ifdef FAKE
                 {"lost", lost},
#endif
    };
    for (size_t at = 0; argc == 2 && at < sizeof cases / sizeof *cases; at++) {
        if (strcmp(cases[at].name, argv[1]) == 0) {
            open_device();
            cases[at].run();
            return EXIT_SUCCESS;
        }
    }
    fprintf(stderr, "no such case\n");
    return EXIT_FAILURE;
}

/*
 * What programs built for NCCL have in common: the names of its ABI that they use, and how ranks find each other. RANK and WORLD_SIZE say
 * which rank this is, of how many, and ID is the file by which rank 0 tells the others the id.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* As a program knows them: the types and numbers of NCCL's ABI. */
typedef void *ncclComm_t;
typedef void *cudaStream_t;
typedef struct {
    char internal[128];
} ncclUniqueId;
enum { ncclSuccess, ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument, ncclInvalidUsage };
enum { ncclRemoteError = 6, ncclInProgress, ncclTimeout };
enum { ncclInt8, ncclUint8, ncclInt32, ncclUint32, ncclInt64, ncclUint64, ncclFloat16, ncclFloat32, ncclFloat64 };
enum { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg };

int ncclGetVersion(int *version);
int ncclGetUniqueId(ncclUniqueId *id);
int ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank);
int ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, void *config);
int ncclCommInitAll(ncclComm_t *comms, int devices, const int *list);
int ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *new, void *config);
int ncclCommShrink(ncclComm_t comm, int *excluded, int count, ncclComm_t *new, void *config, int flags);
int ncclCommDestroy(ncclComm_t comm);
int ncclCommFinalize(ncclComm_t comm);
int ncclCommAbort(ncclComm_t comm);
int ncclCommGetAsyncError(ncclComm_t comm, int *error);
int ncclCommCount(ncclComm_t comm, int *count);
int ncclCommCuDevice(ncclComm_t comm, int *device);
int ncclCommUserRank(ncclComm_t comm, int *rank);
int ncclCommSuspend(ncclComm_t comm, int flags);
const char *ncclGetErrorString(int result);
const char *ncclGetLastError(ncclComm_t comm);
int ncclMemAlloc(void **pointer, size_t bytes);
int ncclMemFree(void *pointer);
int ncclCommRegister(ncclComm_t comm, void *buffer, size_t bytes, void **handle);
int ncclCommDeregister(ncclComm_t comm, void *handle);
int ncclRedOpCreatePreMulSum(int *op, void *factor, int dtype, int residence, ncclComm_t comm);
int ncclRedOpDestroy(int op, ncclComm_t comm);
int ncclAllReduce(const void *in, void *out, size_t count, int dtype, int op, ncclComm_t comm, cudaStream_t stream);
int ncclAllReduceConfig(const void *in, void *out, size_t count, int dtype, int op, ncclComm_t comm, cudaStream_t stream,
                        const void *config);
int ncclReduce(const void *in, void *out, size_t count, int dtype, int op, int root, ncclComm_t comm, cudaStream_t stream);
int ncclBcast(void *buffer, size_t count, int dtype, int root, ncclComm_t comm, cudaStream_t stream);
int ncclBroadcast(const void *in, void *out, size_t count, int dtype, int root, ncclComm_t comm, cudaStream_t stream);
int ncclReduceScatter(const void *in, void *out, size_t count, int dtype, int op, ncclComm_t comm, cudaStream_t stream);
int ncclAllGather(const void *in, void *out, size_t count, int dtype, ncclComm_t comm, cudaStream_t stream);
int ncclAlltoAll(const void *in, void *out, size_t count, int dtype, ncclComm_t comm, cudaStream_t stream);
int ncclGather(const void *in, void *out, size_t count, int dtype, int root, ncclComm_t comm, cudaStream_t stream);
int ncclScatter(const void *in, void *out, size_t count, int dtype, int root, ncclComm_t comm, cudaStream_t stream);
int ncclSend(const void *in, size_t count, int dtype, int peer, ncclComm_t comm, cudaStream_t stream);
int ncclRecv(void *out, size_t count, int dtype, int peer, ncclComm_t comm, cudaStream_t stream);
int ncclGroupStart(void);
int ncclGroupEnd(void);

#define COUNT 1000
#define MOST 8

static int rank = -1, ranks;

static void fail(int line, const char *what) {
    fprintf(stderr, "rank %d, line %d: %s; last error: %s\n", rank, line, what, ncclGetLastError(NULL));
    exit(EXIT_FAILURE);
}

#define CHECK(holds) ((holds) ? (void)0 : fail(__LINE__, #holds))
#define OK(call) CHECK((call) == ncclSuccess)
/* A call that fails, with a text that contains a word. */
#define FAILS(call, result, word)                                                                                      \
    do {                                                                                                               \
        CHECK((call) == (result));                                                                                     \
        CHECK(strstr(ncclGetLastError(NULL), word));                                                                   \
    } while (0)

static int number(const char *name) {
    const char *text = getenv(name);
    CHECK(text);
    return (int)strtol(text, NULL, 10);
}

static ncclUniqueId told(void) {
    ncclUniqueId id;
    const char *path = getenv("ID");
    char other[4096];
    CHECK(path);
    snprintf(other, sizeof other, "%s.new", path);
    if (rank == 0) {
        OK(ncclGetUniqueId(&id));
        FILE *file = fopen(other, "wb");
        CHECK(file && fwrite(&id, sizeof id, 1, file) == 1 && fclose(file) == 0);
        CHECK(rename(other, path) == 0);
        return id;
    }
    for (int tries = 0; tries < 2000; tries++) {
        FILE *file = fopen(path, "rb");
        if (file) {
            CHECK(fread(&id, sizeof id, 1, file) == 1);
            fclose(file);
            return id;
        }
        usleep(10000);
    }
    fail(__LINE__, "nobody told the id");
    return id;
}

static ncclComm_t join(void) {
    ncclComm_t comm = NULL;
    int found = -1;
    rank = number("RANK");
    ranks = number("WORLD_SIZE");
    CHECK(ranks <= MOST);
    OK(ncclCommInitRank(&comm, ranks, told(), rank));
    OK(ncclCommCount(comm, &found));
    CHECK(found == ranks);
    OK(ncclCommUserRank(comm, &found));
    CHECK(found == rank);
    OK(ncclCommGetAsyncError(comm, &found));
    CHECK(found == ncclSuccess);
    return comm;
}

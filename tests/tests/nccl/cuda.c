/*
 * Stands in for CUDA's driver where there is no GPU. A device's memory has addresses that the processor cannot reach, and each stream is a
 * thread, which copies late and in pieces. Host functions of all streams run one after the other, as a driver may have it. What a driver
 * leaves undefined ends the process: a copy to or from memory that is not pinned, a number to wait for that is not.
 */
#define _GNU_SOURCE
#include "cuda.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define DEVICE_BYTES ((size_t)256 << 20)
#define MOST 64

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER, functions = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
/* Addresses of the device, what lies behind them, and how much is allocated. */
static char *device, *behind;
static size_t allocated;
/* Pinned memory of the host's. */
static struct {
    char *at;
    size_t bytes;
} pinned[MOST];
static __thread CUcontext current;
static int context;

enum kind { COPY, CALL, WAIT };

struct task {
    struct task *next;
    enum kind kind;
    char *to, *from;
    size_t bytes;
    void (*function)(void *);
    void *data;
    uint32_t *number, value;
};

struct stream {
    struct task *first, **last;
    int busy, captured, failed;
};

static struct stream usual;

static void undefined(const char *what) {
    fprintf(stderr, "the driver was misused: %s\n", what);
    abort();
}

static int is_device(const char *at) {
    return device && at >= device && at < device + DEVICE_BYTES;
}

static int is_pinned(const char *at, size_t bytes) {
    for (int i = 0; i < MOST; i++)
        if (pinned[i].bytes && at >= pinned[i].at && at + bytes <= pinned[i].at + pinned[i].bytes)
            return 1;
    return 0;
}

static char *reached(char *at, size_t bytes) {
    if (is_device(at))
        return behind + (at - device);
    if (!is_pinned(at, bytes))
        undefined("a copy of memory that is not pinned");
    return at;
}

static void run(struct task *task) {
    static __thread unsigned seed = 7;
    switch (task->kind) {
    case COPY:
        usleep(rand_r(&seed) % 200);
        for (size_t at = 0; at < task->bytes; at += 4096) {
            size_t part = task->bytes - at < 4096 ? task->bytes - at : 4096;
            memcpy(task->to + at, task->from + at, part);
        }
        break;
    case CALL:
        pthread_mutex_lock(&functions);
        task->function(task->data);
        pthread_mutex_unlock(&functions);
        break;
    case WAIT:
        while (__atomic_load_n(task->number, __ATOMIC_ACQUIRE) < task->value)
            usleep(20);
    }
}

static void *work(void *data) {
    struct stream *stream = data;
    pthread_mutex_lock(&lock);
    for (;;) {
        struct task *task = stream->first;
        if (!task || stream->failed) {
            stream->busy = 0;
            pthread_cond_broadcast(&moved);
            pthread_cond_wait(&moved, &lock);
            continue;
        }
        stream->busy = 1;
        stream->first = task->next;
        if (!stream->first)
            stream->last = &stream->first;
        pthread_mutex_unlock(&lock);
        run(task);
        free(task);
        pthread_mutex_lock(&lock);
    }
    return NULL;
}

static void begin(struct stream *stream) {
    pthread_t thread;
    stream->last = &stream->first;
    if (pthread_create(&thread, NULL, work, stream) || pthread_detach(thread))
        undefined("no thread");
}

static struct stream *of(CUstream handle) {
    if ((uintptr_t)handle > 2)
        return handle;
    if (!current)
        undefined("the default stream without a context");
    return &usual;
}

static int queue(CUstream handle, struct task task) {
    struct stream *stream = of(handle);
    struct task *own = malloc(sizeof *own);
    if (!own)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *own = task;
    pthread_mutex_lock(&lock);
    if (stream->captured)
        undefined("a call into a capture that knows nothing of it");
    *stream->last = own;
    stream->last = &own->next;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

int cuInit(unsigned flags) {
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    int memory = memfd_create("device", MFD_CLOEXEC);
    if (memory < 0 || ftruncate(memory, (off_t)DEVICE_BYTES))
        return CUDA_ERROR_OUT_OF_MEMORY;
    behind = mmap(NULL, DEVICE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    device = mmap(NULL, DEVICE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    close(memory);
    if (behind == MAP_FAILED || device == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    begin(&usual);
    return CUDA_SUCCESS;
}

int cuDeviceGet(CUdevice *to, int number) {
    *to = number;
    return number == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

int cuDevicePrimaryCtxRetain(CUcontext *to, CUdevice number) {
    *to = &context;
    return number == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

int cuCtxSetCurrent(CUcontext to) {
    current = to;
    return CUDA_SUCCESS;
}

int cuCtxGetCurrent(CUcontext *to) {
    *to = current;
    return CUDA_SUCCESS;
}

/* One deep, which is as deep as the library goes beside the program's own. */
static __thread CUcontext before[8];
static __thread int depth;

int cuCtxPushCurrent_v2(CUcontext to) {
    if (to != &context || depth == 8)
        return CUDA_ERROR_INVALID_VALUE;
    before[depth++] = current;
    current = to;
    return CUDA_SUCCESS;
}

int cuCtxPopCurrent_v2(CUcontext *to) {
    if (depth == 0)
        undefined("a context popped that was not pushed");
    *to = current;
    current = before[--depth];
    return CUDA_SUCCESS;
}

int cuGetErrorName(int code, const char **name) {
    *name = code == CUDA_ERROR_ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OF_A_TEST";
    return CUDA_SUCCESS;
}

int cuPointerGetAttribute(void *value, unsigned attribute, CUdeviceptr address) {
    char *at = (char *)(uintptr_t)address;
    pthread_mutex_lock(&lock);
    int here = is_device(at), known = here || is_pinned(at, 1);
    pthread_mutex_unlock(&lock);
    if (!known)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute == 1)
        *(CUcontext *)value = &context;
    else if (attribute == 2)
        *(unsigned *)value = here ? 2 : 1;
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

int cuMemAlloc_v2(CUdeviceptr *to, size_t bytes) {
    size_t all = (bytes + 511) & ~(size_t)511;
    pthread_mutex_lock(&lock);
    int fits = all <= DEVICE_BYTES - allocated;
    if (fits) {
        *to = (uintptr_t)(device + allocated);
        allocated += all;
    }
    pthread_mutex_unlock(&lock);
    return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

int cuMemFree_v2(CUdeviceptr memory) {
    return is_device((char *)(uintptr_t)memory) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static int pin(char *at, size_t bytes) {
    pthread_mutex_lock(&lock);
    int result = is_pinned(at, 1) ? CUDA_ERROR_ALREADY_REGISTERED : CUDA_ERROR_OUT_OF_MEMORY;
    for (int i = 0; i < MOST && result == CUDA_ERROR_OUT_OF_MEMORY; i++) {
        if (pinned[i].bytes == 0) {
            pinned[i].at = at;
            pinned[i].bytes = bytes;
            result = CUDA_SUCCESS;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) {
    if (flags != 3 || (uintptr_t)memory % 4096 || bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    return pin(memory, bytes);
}

int cuMemHostUnregister(void *memory) {
    int result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++) {
        if (pinned[i].bytes && pinned[i].at == memory) {
            pinned[i].bytes = 0;
            result = CUDA_SUCCESS;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int cuMemHostAlloc(void **to, size_t bytes, unsigned flags) {
    (void)flags;
    *to = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return *to == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : pin(*to, bytes);
}

int cuMemHostGetDevicePointer_v2(CUdeviceptr *to, void *host, unsigned flags) {
    *to = (uintptr_t)host;
    return flags == 0 && is_pinned(host, 1) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

int cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    struct task task = {.kind = COPY, .bytes = bytes};
    pthread_mutex_lock(&lock);
    task.to = reached((char *)(uintptr_t)to, bytes);
    task.from = reached((char *)(uintptr_t)from, bytes);
    pthread_mutex_unlock(&lock);
    return queue(stream, task);
}

int cuLaunchHostFunc(CUstream stream, void (*function)(void *), void *data) {
    return queue(stream, (struct task){.kind = CALL, .function = function, .data = data});
}

int cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr at, uint32_t value, unsigned flags) {
    char *number = (char *)(uintptr_t)at;
    if (flags || !is_pinned(number, sizeof value))
        return CUDA_ERROR_INVALID_VALUE;
    return queue(stream, (struct task){.kind = WAIT, .number = (uint32_t *)(void *)number, .value = value});
}

int cuStreamCreate(CUstream *to, unsigned flags) {
    struct stream *stream = calloc(1, sizeof *stream);
    if (!stream || flags > 1)
        return CUDA_ERROR_OUT_OF_MEMORY;
    begin(stream);
    *to = stream;
    return CUDA_SUCCESS;
}

int cuStreamGetCtx(CUstream stream, CUcontext *to) {
    of(stream);
    *to = &context;
    return CUDA_SUCCESS;
}

int cuStreamIsCapturing(CUstream stream, int *status) {
    *status = of(stream)->captured;
    return CUDA_SUCCESS;
}

int cuStreamBeginCapture_v2(CUstream stream, int mode) {
    (void)mode;
    of(stream)->captured = 1;
    return CUDA_SUCCESS;
}

int cuStreamEndCapture(CUstream stream, void **graph) {
    of(stream)->captured = 0;
    *graph = NULL;
    return CUDA_SUCCESS;
}

/* What a kernel does that writes where nothing is. The test's own. */
int cuTestFail(CUstream stream) {
    pthread_mutex_lock(&lock);
    of(stream)->failed = 1;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static int state(struct stream *stream) {
    if (stream->failed)
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    return stream->first || stream->busy ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

int cuStreamQuery(CUstream stream) {
    pthread_mutex_lock(&lock);
    int now = state(of(stream));
    pthread_mutex_unlock(&lock);
    return now;
}

int cuStreamSynchronize(CUstream stream) {
    int now;
    pthread_mutex_lock(&lock);
    while ((now = state(of(stream))) == CUDA_ERROR_NOT_READY)
        pthread_cond_wait(&moved, &lock);
    pthread_mutex_unlock(&lock);
    return now;
}

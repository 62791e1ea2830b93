/*
 * What a small AllReduce takes from C: the median and the 99th percentile in nanoseconds, of as many as argv[1] says.
 * latency.rs is the same in Rust.
 */
#define _POSIX_C_SOURCE 200809L
#include <harmonaize.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define ELEMENTS 256
#define WARM_UP 1000
#define STEP UINT64_C(30000000000)

static void check(harmonaize_status_t status) {
    if (status != HARMONAIZE_OK) {
        fprintf(stderr, "%s\n", harmonaize_last_error()->text);
        exit(EXIT_FAILURE);
    }
}

static uint32_t number(const char *text, uint32_t usual) {
    return text ? (uint32_t)strtoul(text, NULL, 10) : usual;
}

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * UINT64_C(1000000000) + (uint64_t)time.tv_nsec;
}

static int ascending(const void *one, const void *other) {
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
    return (a > b) - (a < b);
}

int main(int argc, char **argv) {
    uint32_t count = number(argc > 1 ? argv[1] : NULL, 10000), rank = number(getenv("RANK"), 0);
    uint64_t *times = calloc(count, sizeof *times);
    harmonaize_client_t *client;
    harmonaize_communicator_t *job;
    harmonaize_tensor_t *tensor;
    check(harmonaize_attach(NULL, NULL, &client));
    check(harmonaize_join(client, "latency", rank, number(getenv("WORLD_SIZE"), 1), NULL, &job));
    check(harmonaize_tensor_create(client, HARMONAIZE_F32, ELEMENTS, &tensor));
    if (!count || !times)
        return EXIT_FAILURE;

    for (uint32_t call = 0; call < WARM_UP + count; call++) {
        harmonaize_operation_t *operation;
        uint64_t begun = now();
        check(harmonaize_all_reduce(job, tensor, tensor, HARMONAIZE_MAX, &operation));
        check(harmonaize_wait(operation, STEP, NULL));
        harmonaize_operation_free(operation);
        if (call >= WARM_UP)
            times[call - WARM_UP] = now() - begun;
    }

    qsort(times, count, sizeof *times, ascending);
    printf("%" PRIu64 " %" PRIu64 "\n", times[count / 2], times[count - 1 - count / 100]);
    free(times);
    harmonaize_tensor_free(tensor);
    harmonaize_communicator_free(job);
    harmonaize_client_free(client);
    return EXIT_SUCCESS;
}

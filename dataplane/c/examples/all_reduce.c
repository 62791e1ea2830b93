/*
 * Hello, collective: every rank gives its number plus one, and all get the sum.
 *
 * HARMONAIZE_SOCKET names the agent's socket. A launcher says which rank this is, of how many: torchrun by RANK and
 * WORLD_SIZE, mpirun and srun by variables of their own.
 */
#include <harmonaize.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define ELEMENTS 1024
#define SECOND UINT64_C(1000000000)

static void check(harmonaize_status_t status) {
    if (status != HARMONAIZE_OK) {
        fprintf(stderr, "%s\n", harmonaize_last_error()->text);
        exit(EXIT_FAILURE);
    }
}

int main(void) {
    uint32_t rank, ranks;
    check(harmonaize_place(&rank, &ranks));

    harmonaize_client_t *client;
    harmonaize_communicator_t *job;
    harmonaize_tensor_t *tensor;
    check(harmonaize_attach(NULL, NULL, &client));
    check(harmonaize_join(client, "hello", rank, ranks, NULL, &job));
    check(harmonaize_tensor_create(client, HARMONAIZE_F32, ELEMENTS, &tensor));

    void *data;
    check(harmonaize_tensor_data(tensor, &data));
    float *values = data;
    for (int i = 0; i < ELEMENTS; i++)
        values[i] = (float)(rank + 1);

    harmonaize_operation_t *operation;
    harmonaize_receipt_t receipt;
    check(harmonaize_all_reduce(job, tensor, tensor, HARMONAIZE_SUM, &operation));
    check(harmonaize_wait(operation, 30 * SECOND, &receipt));

    float sum = (float)ranks * (float)(ranks + 1) / 2;
    for (int i = 0; i < ELEMENTS; i++) {
        if (values[i] != sum) {
            fprintf(stderr, "element %d is %g, not %g\n", i, values[i], sum);
            return EXIT_FAILURE;
        }
    }
    printf("rank %" PRIu32 " of %" PRIu32 ": the sum is %g, %" PRIu64 " bytes were sent\n", rank, ranks, sum,
           receipt.wire_bytes);

    harmonaize_operation_free(operation);
    harmonaize_tensor_free(tensor);
    harmonaize_communicator_free(job);
    harmonaize_client_free(client);
    return EXIT_SUCCESS;
}

// SPDX-License-Identifier: MIT OR Apache-2.0
// Processes of one machine add up the gradients of several layers while they compute the next ones.
// usage: overlap RANKS [DIRECTORY]; cc overlap.c -lpcieipc
#include "processes.h"

enum { LAYERS = 12, COUNT = 50001 };

static int rank_main(unsigned rank, unsigned ranks, const char *directory, int helped)
{
    struct pcieipc_options options = {
        .size = sizeof(options), .directory = directory, .rank = rank, .ranks = ranks, .helper_thread = helped
    };
    pcieipc_group *group;
    expect(pcieipc_group_meet(&options, &group), "meeting");

    static float gradient[LAYERS][COUNT];
    pcieipc_request *requests[LAYERS];
    for (unsigned layer = 0; layer < LAYERS; layer++) {
        for (size_t i = 0; i < COUNT; i++)
            gradient[layer][i] = (float)(i % 1000 + layer) * (float)(rank + 1);
        struct pcieipc_call call = {
            .size = sizeof(call), .collective = PCIEIPC_COLLECTIVE_ALL_REDUCE, .element = PCIEIPC_TYPE_F32,
            .operation = PCIEIPC_OP_SUM, .to = gradient[layer], .count = COUNT, .timeout_ms = 60000
        };
        expect(pcieipc_start(group, &call, &requests[layer]), "starting");
        expect(pcieipc_group_progress(group, NULL), "progress");
    }
    // A blocking call queues behind those in flight.
    expect(pcieipc_barrier(group, 60000), "barrier");

    size_t wrong = 0;
    for (unsigned layer = 0; layer < LAYERS; layer++) {
        bool done;
        expect(pcieipc_request_test(group, requests[layer], &done), "test");
        expect(pcieipc_request_wait(group, requests[layer], 0), "wait");
        if (!pcieipc_request_is_done(requests[layer]))
            wrong++;
        pcieipc_request_free(requests[layer]);
        for (size_t i = 0; i < COUNT; i++)
            wrong += gradient[layer][i] != (float)(i % 1000 + layer) * (float)(ranks * (ranks + 1) / 2);
    }
    printf("rank %u of %u%s: %d layers, %zu wrong\n", rank, ranks, helped ? " with a helper thread" : "", LAYERS, wrong);
    pcieipc_group_leave(group);
    return wrong != 0;
}

int main(int argc, char **argv)
{
    int failed = 0;
    for (int helped = 0; helped < 2; helped++)
        failed |= run(argc > 1 ? (unsigned)atoi(argv[1]) : 2, argc > 2 ? argv[2] : NULL, helped, rank_main);
    return failed;
}

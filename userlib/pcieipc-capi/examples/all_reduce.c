// SPDX-License-Identifier: MIT OR Apache-2.0
// Processes of one machine add up their gradients.
// usage: all_reduce RANKS [DIRECTORY]; cc all_reduce.c -lpcieipc
#include "processes.h"

enum { COUNT = 1000003 };

static int rank_main(unsigned rank, unsigned ranks, const char *directory, int unused)
{
    (void)unused;
    struct pcieipc_options options = { .size = sizeof(options), .directory = directory, .rank = rank, .ranks = ranks };
    pcieipc_group *group;
    expect(pcieipc_group_meet(&options, &group), "meeting");

    float *gradient = malloc(COUNT * sizeof(*gradient));
    for (size_t i = 0; i < COUNT; i++)
        gradient[i] = (float)(i % 1000) * (float)(rank + 1);
    expect(pcieipc_all_reduce(group, gradient, COUNT, PCIEIPC_TYPE_F32, PCIEIPC_OP_SUM, 10000), "all-reduce");

    // The same without copies through rings.
    pcieipc_buffer *buffer;
    expect(pcieipc_buffer_register(group, COUNT, PCIEIPC_TYPE_F32, 10000, &buffer), "registering");
    float *shared = pcieipc_buffer_data(buffer);
    for (size_t i = 0; i < COUNT; i++)
        shared[i] = (float)(i % 1000) * (float)(rank + 1);
    expect(pcieipc_buffer_all_reduce(group, buffer, PCIEIPC_OP_SUM, 10000), "all-reduce of a registered buffer");

    size_t wrong = 0;
    for (size_t i = 0; i < COUNT; i++) {
        float want = (float)(i % 1000) * (float)(ranks * (ranks + 1) / 2);
        wrong += gradient[i] != want || shared[i] != want;
    }
    expect(pcieipc_barrier(group, 10000), "barrier");
    printf("rank %u of %u: %d elements, %zu wrong\n", rank, ranks, COUNT, wrong);
    pcieipc_buffer_free(buffer);
    pcieipc_group_leave(group);
    free(gradient);
    return wrong != 0;
}

int main(int argc, char **argv)
{
    return run(argc > 1 ? (unsigned)atoi(argv[1]) : 2, argc > 2 ? argv[2] : NULL, 0, rank_main);
}

// SPDX-License-Identifier: MIT OR Apache-2.0
// A process dies; the others agree on that, a new one takes its place, and all go on.
// usage: recover RANKS; cc recover.c -lpcieipc
#include <pcieipc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { COUNT = 10007, SECONDS = 30 };

static void expect(enum pcieipc_status status, const char *what)
{
    if (status != PCIEIPC_STATUS_OK) {
        fprintf(stderr, "%s: %s: %s\n", what, pcieipc_status_name(status), pcieipc_last_error());
        exit(1);
    }
}

static struct pcieipc_options options_of(unsigned rank, unsigned ranks, const char *directory)
{
    return (struct pcieipc_options){ .size = sizeof(struct pcieipc_options), .directory = directory, .rank = rank,
                                     .ranks = ranks, .checked = 1 };
}

// One step: the input stays as it is, so that it can be done again.
static enum pcieipc_status step(pcieipc_group *group, const float *input, float *sum)
{
    return pcieipc_all_reduce_into(group, input, sum, COUNT, PCIEIPC_TYPE_F32, PCIEIPC_OP_SUM, SECONDS * 1000);
}

static int rank_main(unsigned rank, unsigned ranks, const char *directory, int replaces)
{
    struct pcieipc_options options = options_of(rank, ranks, directory);
    float *input = malloc(COUNT * sizeof(*input)), *sum = malloc(COUNT * sizeof(*sum));
    for (size_t i = 0; i < COUNT; i++)
        input[i] = (float)(i % 1000) * (float)(rank + 1);

    pcieipc_group *group;
    if (replaces) {
        expect(pcieipc_group_rejoin(&options, &group), "rejoining");
    } else {
        expect(pcieipc_group_meet(&options, &group), "meeting");
        enum pcieipc_status status = step(group, input, sum);
        if (rank == ranks - 1) {
            expect(status, "the first step");
            raise(SIGKILL);
        }
        // That one rank got Ok does not say that all have: the others learn of its death in this step or in the next one.
        if (status == PCIEIPC_STATUS_OK)
            status = step(group, input, sum);
        struct pcieipc_agreement agreement = { .size = sizeof(agreement) };
        expect(pcieipc_group_agree(group, status == PCIEIPC_STATUS_OK, SECONDS * 1000, &agreement), "agreeing");
        if (agreement.ok || agreement.failed != 1u << (ranks - 1)) {
            fprintf(stderr, "rank %u: agreed on %u, %#x\n", rank, agreement.ok, agreement.failed);
            return 1;
        }
        expect(pcieipc_group_recover(group, SECONDS * 1000), "recovering");
    }

    expect(step(group, input, sum), "the step again");
    size_t wrong = 0;
    for (size_t i = 0; i < COUNT; i++)
        wrong += sum[i] != (float)(i % 1000) * (float)(ranks * (ranks + 1) / 2);
    printf("rank %u of %u%s: %d elements, %zu wrong\n", rank, ranks, replaces ? ", a new process" : "", COUNT, wrong);
    pcieipc_group_leave(group);
    free(input);
    free(sum);
    return wrong != 0;
}

static pid_t start(unsigned rank, unsigned ranks, const char *directory, int replaces)
{
    fflush(stdout);
    pid_t child = fork();
    if (child < 0) {
        perror("fork");
        exit(1);
    }
    if (child == 0)
        exit(rank_main(rank, ranks, directory, replaces));
    return child;
}

int main(int argc, char **argv)
{
    unsigned ranks = argc > 1 ? (unsigned)atoi(argv[1]) : 2;
    char directory[] = "/tmp/pcieipc-XXXXXX";
    if (!mkdtemp(directory)) {
        perror("mkdtemp");
        return 1;
    }
    pid_t last = 0;
    for (unsigned rank = 0; rank < ranks; rank++)
        last = start(rank, ranks, directory, 0);
    int failed = 0, status;
    for (pid_t ended; (ended = wait(&status)) > 0;) {
        if (ended == last && WIFSIGNALED(status)) {
            last = 0;
            start(ranks - 1, ranks, directory, 1);
        } else {
            failed |= status;
        }
    }
    return failed != 0 || last != 0;
}

// SPDX-License-Identifier: MIT OR Apache-2.0
// What the examples have in common: one process a rank, and calls that must succeed.
#include <pcieipc.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void expect(enum pcieipc_status status, const char *what)
{
    if (status != PCIEIPC_STATUS_OK) {
        fprintf(stderr, "%s: %s: %s\n", what, pcieipc_status_name(status), pcieipc_last_error());
        exit(1);
    }
}

// Runs `rank_main` in a process for each rank; whether one of them failed.
static int run(unsigned ranks, const char *directory, int argument,
               int (*rank_main)(unsigned rank, unsigned ranks, const char *directory, int argument))
{
    char made[] = "/tmp/pcieipc-XXXXXX";
    if (!directory && !(directory = mkdtemp(made))) {
        perror("mkdtemp");
        return 1;
    }
    for (unsigned rank = 0; rank < ranks; rank++) {
        fflush(stdout);
        pid_t child = fork();
        if (child < 0) {
            perror("fork");
            return 1;
        }
        if (child == 0)
            exit(rank_main(rank, ranks, directory, argument));
    }
    int failed = 0, status;
    while (wait(&status) > 0)
        failed |= status;
    return failed != 0;
}

// SPDX-License-Identifier: MIT OR Apache-2.0
// What the examples have in common: one process a rank, and calls that must succeed.
#include <pcieipc.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef __LP64__
// What a program that was linked before relies on. A version that adds a field makes a struct longer, and moves nothing.
#define AT(type, field, offset) _Static_assert(offsetof(struct type, field) == (offset), #type "." #field)
AT(pcieipc_options, size, 0);
AT(pcieipc_options, directory, 8);
AT(pcieipc_options, rank, 16);
AT(pcieipc_options, ranks, 20);
AT(pcieipc_options, transport, 24);
AT(pcieipc_options, endpoint, 28);
AT(pcieipc_options, ring_bytes, 32);
AT(pcieipc_options, meeting_timeout_ms, 40);
AT(pcieipc_options, algorithm, 44);
AT(pcieipc_options, helper_thread, 48);
AT(pcieipc_options, tuned, 52);
AT(pcieipc_options, checked, 56);
AT(pcieipc_options, degraded_link_is_error, 60);
AT(pcieipc_agreement, ok, 8);
AT(pcieipc_agreement, failed, 12);
AT(pcieipc_agreement, returned, 16);
AT(pcieipc_agreement, reserved, 20);
AT(pcieipc_error, status, 8);
AT(pcieipc_error, rank, 12);
AT(pcieipc_error, endpoint, 16);
AT(pcieipc_error, generation, 24);
AT(pcieipc_call, collective, 8);
AT(pcieipc_call, element, 12);
AT(pcieipc_call, operation, 16);
AT(pcieipc_call, rank, 20);
AT(pcieipc_call, from, 24);
AT(pcieipc_call, to, 32);
AT(pcieipc_call, count, 40);
AT(pcieipc_call, timeout_ms, 48);
#undef AT
_Static_assert(sizeof(struct pcieipc_options) >= 64 && sizeof(struct pcieipc_agreement) >= 24, "structs only grow");
_Static_assert(sizeof(struct pcieipc_error) >= 32 && sizeof(struct pcieipc_call) >= 56, "structs only grow");
_Static_assert(PCIEIPC_STATUS_INTERNAL == 13 && PCIEIPC_TYPE_U64 == 11 && PCIEIPC_OP_AVERAGE == 4, "numbers stay");
_Static_assert(PCIEIPC_COLLECTIVE_BARRIER == 9 && PCIEIPC_TRANSPORT_KMOD == 1, "numbers stay");
#endif

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

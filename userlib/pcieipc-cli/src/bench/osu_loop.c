// SPDX-License-Identifier: MIT OR Apache-2.0
// Times MPI_Allreduce of floats as the OSU benchmarks do: two buffers, many calls in a row, the slowest rank counts.
// usage: osu_loop SECONDS FOLDER; measures the size in FOLDER/turn-0 when that is there, then the one in turn-1 and so on, until one is 0.
// Rank 0 prints "BYTES MICROSECONDS" for each, the median of five repeats. Meanwhile it sleeps, so that others can be measured.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static size_t turn(const char *folder, int number)
{
    char path[4096];
    snprintf(path, sizeof(path), "%s/turn-%d", folder, number);
    FILE *file;
    while (!(file = fopen(path, "r")))
        usleep(2000);
    unsigned long long bytes = 0;
    if (fscanf(file, "%llu", &bytes) != 1)
        bytes = 0;
    fclose(file);
    return bytes;
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    double budget = atof(argv[1]);
    size_t bytes;
    for (int number = 0; argc > 2 && (bytes = turn(argv[2], number)) > 0; number++) {
        int count = (int)(bytes / sizeof(float));
        float *in = malloc(bytes), *out = malloc(bytes);
        for (int i = 0; i < count; i++) {
            in[i] = (float)((i * 7 + rank * 13) % 7);
            out[i] = 0;
        }
        double once, slowest, times[5];
        for (int i = 0; i < 4; i++) {
            if (i == 1)
                once = MPI_Wtime();
            MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        }
        once = (MPI_Wtime() - once) / 3;
        MPI_Allreduce(&once, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        int calls = (int)(budget / slowest);
        calls = calls < 3 ? 3 : calls > 20000 ? 20000 : calls;
        for (int repeat = 0; repeat < 5; repeat++) {
            MPI_Barrier(MPI_COMM_WORLD);
            double begun = MPI_Wtime();
            for (int i = 0; i < calls; i++)
                MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
            double each = (MPI_Wtime() - begun) / calls;
            MPI_Allreduce(&each, &times[repeat], 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        }
        qsort(times, 5, sizeof(times[0]), by_value);
        if (rank == 0) {
            printf("%zu %.4f\n", bytes, times[2] * 1e6);
            fflush(stdout);
        }
        free(in);
        free(out);
    }
    MPI_Finalize();
    return 0;
}

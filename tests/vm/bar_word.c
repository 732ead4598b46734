// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * bar_word ADDRESS OFFSET [BAR [VALUE]]: the 32-bit word at this offset of BAR 0, or another, of a function that no driver holds, as 0x12345678. With VALUE
 * that is stored before. Through sysfs, because not every kernel has /dev/mem.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

int main(int argc, char **argv)
{
	char path[128];

	if (argc < 3 || argc > 5)
		return 2;
	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/resource%s", argv[1], argc > 3 ? argv[3] : "0");
	unsigned long offset = strtoul(argv[2], NULL, 0);
	int registers = open(path, O_RDWR | O_SYNC | O_CLOEXEC);
	void *page = registers < 0 ? MAP_FAILED : mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, registers, (off_t)(offset & ~0xfffUL));

	if (page == MAP_FAILED) {
		fprintf(stderr, "%s: %s\n", path, strerror(errno));
		return 1;
	}
	volatile uint32_t *word = (uint32_t *)((uint8_t *)page + (offset & 0xffc));

	if (argc > 4)
		*word = (uint32_t)strtoul(argv[4], NULL, 0);
	printf("0x%08X\n", *word);
	return 0;
}

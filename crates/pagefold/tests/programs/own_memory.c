/*
 * Writes memory that is folded in two ways for which the kernel does not wait while a page is out of reach: through
 * /proc/self/mem ("mem"), and by FUTEX_WAKE_OP ("futex"). Both may be refused then. A write that was answered must be there, and
 * one that was refused must not.
 *
 * Usage: own_memory mem|futex SECONDS
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PAGES = 4096, PAGE = 4096 };

static int write_mem(int mem, uint32_t *at, uint32_t value)
{
	return pwrite(mem, &value, sizeof(value), (off_t)(uintptr_t)at) == sizeof(value) ? 0 : errno;
}

static int write_futex(uint32_t *at, uint32_t value)
{
	static uint32_t other;
	int set = FUTEX_OP(FUTEX_OP_SET, value, FUTEX_OP_CMP_EQ, 0);
	return syscall(SYS_futex, &other, FUTEX_WAKE_OP | FUTEX_PRIVATE_FLAG, 1, (void *)1, at, set) < 0 ? errno : 0;
}

int main(int count, char **words)
{
	static uint32_t model[PAGES];
	unsigned long calls = 0, refused = 0;
	int is_mem = count > 2 && !strcmp(words[1], "mem");
	int mem = open("/proc/self/mem", O_RDWR);
	time_t until = time(0) + (count > 2 ? atoi(words[2]) : 10);
	char *area = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	/* Each page is there twice, but for its first word, which is 0 or 1. */
	for (size_t page = 0; page < PAGES; page++)
		for (size_t word = 1; word < PAGE / 8; word++)
			((uint64_t *)(area + page * PAGE))[word] = (page / 2 * 512 + word) * 0x9e3779b97f4a7c15u | 1;
	while (time(0) < until) {
		size_t page = random() % PAGES;
		uint32_t *at = (uint32_t *)(area + page * PAGE), value = !model[page];
		int error = is_mem ? write_mem(mem, at, value) : write_futex(at, value);

		calls++;
		if (!error)
			model[page] = value;
		else if (error == (is_mem ? EIO : EFAULT))
			refused++;
		else
			return printf("an answer that nobody expects: %s\n", strerror(error)), 1;
		if (*(volatile uint32_t *)at != model[page])
			return printf("page %zu has %u in place of %u\n", page, *at, model[page]), 1;
		if (calls % 64 == 0)
			nanosleep(&(struct timespec){ 0, 1000000 }, 0);
	}
	for (size_t page = 0; page < PAGES; page++)
		if (*(uint32_t *)(area + page * PAGE) != model[page])
			return printf("page %zu has changed\n", page), 1;
	printf("%lu of %lu calls were refused\n", refused, calls);
	return refused > calls / 1000;
}

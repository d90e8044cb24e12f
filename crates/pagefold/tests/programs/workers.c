/*
 * A server that forks its workers when it is told to. It has filled memory by then, which they inherit, and each fills as much
 * of its own. All obey the same orders, which a test writes to a file that they have mapped.
 *
 * workers FILE: the file is a table of words. The first three: the number of the order, the order, how many workers there are.
 * From the fifth on, four words a process, the parent first: its pid, the last order that it has carried out, wrong pages.
 */
#include "pages.h"

enum { PAGES = 2048, TABLE_BYTES = 4096, HEAD = 4, SLOT = 4, MOST = 16 };
enum { NUMBER, ORDER, WORKERS };
enum { PID, DONE, WRONG };

/* Both areas of a process, and which content each of their pages has to have. */
struct areas {
	char *pages[2];
	unsigned char contents[2][PAGES];
};

static volatile uint32_t *table;
static struct areas areas;

static void take_area(int which)
{
	areas.pages[which] = filled_area(PAGES);
	for (size_t n = 0; n < PAGES; n++)
		areas.contents[which][n] = content_of(n);
}

static void write_pages(unsigned content)
{
	for (int which = 0; which < 2; which++)
		for (size_t n = content % 7; areas.pages[which] && n < PAGES; n += 7) {
			fill(areas.pages[which] + n * PAGE_BYTES, content);
			areas.contents[which][n] = content;
		}
}

static void discard_pages(void)
{
	for (int which = 0; which < 2; which++)
		for (size_t n = 0; areas.pages[which] && n < PAGES; n += 5 * RUN) {
			if (madvise(areas.pages[which] + n * PAGE_BYTES, RUN * PAGE_BYTES, MADV_DONTNEED))
				fail("madvise");
			memset(areas.contents[which] + n, 0, RUN);
		}
}

static unsigned wrong(void)
{
	unsigned wrong = 0;

	for (int which = 0; which < 2; which++)
		for (size_t n = 0; areas.pages[which] && n < PAGES; n++)
			wrong += !holds(areas.pages[which] + n * PAGE_BYTES, areas.contents[which][n]);
	return wrong;
}

int main(int count, char **words)
{
	int file = count > 1 ? open(words[1], O_RDWR) : -1;
	uint32_t done = 0, own = 0;

	table = file < 0 ? MAP_FAILED : mmap(NULL, TABLE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (table == MAP_FAILED)
		fail("the table");
	close(file);
	take_area(0);
	for (;;) {
		volatile uint32_t *slot = table + HEAD + own * SLOT;

		slot[PID] = getpid();
		if (table[NUMBER] == done) {
			usleep(10000);
			continue;
		}
		done = table[NUMBER];
		switch (table[ORDER]) {
		case 'f': /* The parent forks a worker. */
			if (own == 0 && table[WORKERS] < MOST && fork() == 0) {
				own = ++table[WORKERS];
				slot = table + HEAD + own * SLOT;
				take_area(1);
				slot[PID] = getpid();
			}
			break;
		case 'w': /* Some pages get a content that they share with none. */
			write_pages(100 + own);
			break;
		case 'b': /* Some pages are as they were. */
			write_pages(1 + done % CONTENTS);
			break;
		case 'd':
			discard_pages();
			break;
		case 'x': /* The last worker executes a program. */
			if (own && own == table[WORKERS])
				execl("/bin/sleep", "sleep", "300", NULL);
			break;
		}
		slot[WRONG] = wrong();
		slot[DONE] = done;
	}
}

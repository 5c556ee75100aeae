/* SPDX-License-Identifier: MIT */
/*
 * Penstock's part in host-bench.sh: a process that reads a file into host memory again and again,
 * each time it is told to by a line on its standard input, and answers each line with
 *
 *	GB/s  CPU-seconds  path[+path]
 *
 * "whole" reads into memory of the file's size, as a program does that keeps what it loads.
 * "window" reads into one window over and over, as dd, fio and cat do, whose buffers stay in the
 * processor's cache: the like-for-like comparison. The memory is allocated and touched before the
 * first answer ("ready"). Opening the file is in the time; checking the bytes is not.
 */
#include <stdlib.h>
#include <string.h>
#include "measure.h"

#define WINDOW ((uint64_t)16 << 20)

/* One extent, or one for each window of the file, all to the same memory. */
static size_t make_extents(struct pen_extent *extents, struct pen_object *file, void *memory,
			   bool window)
{
	uint64_t size = pen_object_size(file), step = window ? WINDOW : size;
	size_t count = 0;

	for (uint64_t at = 0; at < size; at += step)
		extents[count++] = (struct pen_extent){
			.object = file,
			.offset = at,
			.memory = memory,
			.length = size - at < step ? size - at : step,
		};
	return count;
}

/* Each word of a window states an offset that belongs at its place in the window. */
static void check_window(const unsigned char *memory, uint64_t size)
{
	for (uint64_t at = 0; at + 8 <= WINDOW && at + 8 <= size; at += 8) {
		uint64_t word;

		memcpy(&word, memory + at, 8);
		if (word % WINDOW != at || word >= size) {
			fprintf(stderr, "host_bench: wrong bytes at %llu of a window\n",
				(unsigned long long)at);
			exit(1);
		}
	}
}

int main(int argc, char **argv)
{
	struct pen_extent *extents;
	struct pen_device *host;
	struct pen_object *file;
	struct pen_error err;
	uint64_t size;
	void *memory;
	char line[64];

	if (argc != 2) {
		fputs("usage: host_bench FILE    (which holds the pattern)\n", stderr);
		return 2;
	}
	check(pen_device_open("host", &host, &err), &err);
	check(pen_object_open(argv[1], PEN_READ, 0, &file, &err), &err);
	size = pen_object_size(file);
	pen_object_close(file);
	check(pen_device_alloc(host, size, &memory, &err), &err);
	extents = calloc(size / WINDOW + 2, sizeof(*extents));
	if (!extents)
		return 1;
	memset(memory, 0xEE, size);
	puts("ready");
	fflush(stdout);

	while (fgets(line, sizeof(line), stdin)) {
		struct pen_report report = PEN_REPORT_INIT;
		bool window = line[0] == 'w' && line[1] == 'i';
		double start = now(), seconds;
		size_t count;

		check(pen_object_open(argv[1], PEN_READ, 0, &file, &err), &err);
		count = make_extents(extents, file, memory, window);
		check(pen_transfer(PEN_READ, host, extents, count, NULL, &report, &err), &err);
		seconds = now() - start;
		pen_object_close(file);
		printf("%.4f %.4f ", gb_per_s(size, seconds), report.cpu_seconds);
		for (uint32_t i = 0; i < report.path_count; i++)
			printf("%s%s", i ? "+" : "", report.paths[i].path);
		if (window)
			check_window(memory, size);
		else
			check_memory(host, memory, size, "a read");
		memset(memory, 0xEE, window ? WINDOW : size);
		puts("");
		fflush(stdout);
	}
	free(extents);
	pen_device_free(host, memory, size, NULL);
	pen_device_close(host);
	return 0;
}

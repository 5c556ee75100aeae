/* SPDX-License-Identifier: MIT */
/*
 * Penstock's part in host-bench.sh: a process that reads a file into the same host memory again
 * and again, each time it is told to by a line on its standard input, and answers each line with
 *
 *	GB/s  CPU-seconds  path[+path]
 *
 * The memory is allocated and touched before the first answer ("ready"), as is that of a program
 * which loads into buffers it has. Opening the file is in the time; checking the bytes is not.
 */
#include <stdlib.h>
#include <string.h>
#include "measure.h"

int main(int argc, char **argv)
{
	struct pen_extent all = { 0 };
	struct pen_device *host;
	struct pen_object *file;
	struct pen_error err;
	char line[64];

	if (argc != 2) {
		fputs("usage: host_bench FILE    (which holds the pattern)\n", stderr);
		return 2;
	}
	check(pen_device_open("host", &host, &err), &err);
	check(pen_object_open(argv[1], PEN_READ, 0, &file, &err), &err);
	all.length = pen_object_size(file);
	pen_object_close(file);
	check(pen_device_alloc(host, all.length, &all.memory, &err), &err);
	memset(all.memory, 0xEE, all.length);
	puts("ready");
	fflush(stdout);

	while (fgets(line, sizeof(line), stdin)) {
		struct pen_report report = PEN_REPORT_INIT;
		double start = now(), seconds;

		check(pen_object_open(argv[1], PEN_READ, 0, &all.object, &err), &err);
		check(pen_transfer(PEN_READ, host, &all, 1, NULL, &report, &err), &err);
		seconds = now() - start;
		pen_object_close(all.object);
		printf("%.4f %.4f ", gb_per_s(all.length, seconds), report.cpu_seconds);
		for (uint32_t i = 0; i < report.path_count; i++)
			printf("%s%s", i ? "+" : "", report.paths[i].path);
		check_memory(host, all.memory, all.length, "a read");
		memset(all.memory, 0xEE, all.length);
		puts("");
		fflush(stdout);
	}
	pen_device_free(host, all.memory, all.length, NULL);
	pen_device_close(host);
	return 0;
}

/* SPDX-License-Identifier: MIT */
/*
 * What it costs to look at bytes as they pass, and how early a write lets its memory go.
 *
 *   passing FILE [DEVICE [ROUNDS [LANES]]]
 *
 * Loads FILE from the page cache with and without digests (these by LANES lanes, if given), taking
 * turns, and tells the medians of the rounds' ratios. Then writes as much from the device to
 * FILE.out with groups, with memory for all of it and with little, and tells when all was gathered,
 * stored, and durable.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "measure.h"

#define GROUPS 256u

static struct pen_device *device;
static struct pen_object *file;
static uint64_t size;
static void *memory;
static uint32_t lanes;

static double load(int kind, uint64_t chunk)
{
	uint64_t count = chunk ? (size + chunk - 1) / chunk : 0;
	struct pen_digests digests = { .object = file, .chunk = chunk, .count = count,
				       .kind = kind };
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_extent all = { .object = file, .memory = memory, .length = size };
	struct pen_error err;

	if (kind) {
		digests.values = calloc(count, sizeof(uint64_t));
		digests.states = calloc(count, 1);
		options.digests = &digests;
		options.digest_count = 1;
		options.lanes = lanes;
	}
	check(pen_transfer(PEN_READ, device, &all, 1, &options, &report, &err), &err);
	if (kind && report.digested_bytes != size)
		die("only %llu bytes were digested", (unsigned long long)report.digested_bytes);
	free(digests.values);
	free(digests.states);
	return report.seconds;
}

static void digests(int rounds)
{
	static const struct {
		const char *name;
		int kind;
		uint64_t chunk;
	} cases[] = {
		{ "plain again", PEN_DIGEST_NONE, 0 },
		{ "xxh3, 64 KiB", PEN_DIGEST_XXH3, 64 << 10 },
		{ "xxh3, 1 MiB", PEN_DIGEST_XXH3, MIB },
		{ "xxh3, 4 MiB", PEN_DIGEST_XXH3, 4 * MIB },
		{ "crc32, 1 MiB", PEN_DIGEST_CRC32, MIB },
	};

	load(0, 0);
	for (int round = 0; round < rounds; round++) {
		double plain = load(0, 0);

		record("plain", plain);
		for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
			record(cases[i].name, load(cases[i].kind, cases[i].chunk) / plain);
	}
	printf("%-24s %8.4f s %6.2f GB/s\n", "plain", median_of("plain"),
	       gb_per_s(size, median_of("plain")));
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		printf("%-24s %8.3f x plain\n", cases[i].name, median_of(cases[i].name));
}

static double until(struct pen_job *job, double start,
		    size_t (*told)(struct pen_job *, uint64_t *, size_t, double))
{
	uint64_t groups[GROUPS];
	size_t count, all = 0;

	while (all < GROUPS && (count = told(job, groups, GROUPS, 60)))
		all += count;
	return now() - start;
}

static void save(const char *path, uint64_t limit)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_extent parts[GROUPS];
	struct pen_object *target;
	struct pen_error err;
	struct pen_job *job;
	double start, gathered, stored;

	check(pen_object_open(path, PEN_WRITE, size, &target, &err), &err);
	for (uint64_t i = 0; i < GROUPS; i++) {
		uint64_t from = size / GROUPS * i;

		parts[i] = (struct pen_extent){
			.object = target, .offset = from, .memory = (char *)memory + from,
			.length = i + 1 < GROUPS ? size / GROUPS : size - from, .group = i,
		};
	}
	options.groups = GROUPS;
	options.memory_limit = limit;
	start = now();
	check(pen_job_start(PEN_WRITE, device, parts, GROUPS, &options, &job, &err), &err);
	gathered = until(job, start, pen_job_gathered);
	stored = until(job, start, pen_job_stored);
	check(pen_job_wait(job, &report, &err), &err);
	check(pen_object_commit(target, &err), &err);
	printf("limit %-9s gathered %7.3f s, stored %7.3f s, durable %7.3f s, pinned %s\n",
	       size_text(limit), gathered, stored, now() - start, size_text(report.pinned_bytes));
	pen_object_close(target);
	unlink(path);
}

int main(int argc, char **argv)
{
	struct pen_error err;
	char out[4200];
	int fd;

	if (argc < 2)
		die("usage: passing FILE [DEVICE [ROUNDS [LANES]]]");
	check(pen_device_open(argc > 2 ? argv[2] : "cuda:0", &device, &err), &err);
	check(pen_device_ready(device, &err), &err);
	check(pen_object_open(argv[1], PEN_READ, 0, &file, &err), &err);
	size = pen_object_size(file);
	check(pen_device_alloc(device, size, &memory, &err), &err);
	fd = open(argv[1], O_RDONLY | O_CLOEXEC);
	make_warm(fd, size);
	printf("%s, %s\n", argv[1], size_text(size));
	lanes = argc > 4 ? (uint32_t)atoi(argv[4]) : 0;
	digests(argc > 3 ? atoi(argv[3]) : 7);
	snprintf(out, sizeof(out), "%.4000s.out", argv[1]);
	/* The second time staging memory is there already. */
	save(out, size + GIB);
	save(out, size + GIB);
	save(out, GIB);
	save(out, 128 * MIB);
	close(fd);
	check(pen_device_free(device, memory, size, &err), &err);
	pen_object_close(file);
	pen_device_close(device);
	return 0;
}

/* SPDX-License-Identifier: MIT */
/*
 * A first look: write a file, read it cold, half cached and warm, save it back, and say of each
 * which path it took, why, how fast that was, and how that compares with what plain loops reach on
 * the same file in the same minute. Into GPU memory where there is a GPU, else into host memory.
 * Each figure is the median of three rounds, fewer on a slow disk.
 */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/text.h"
#include "ceiling.h"

#define ROUNDS 3
#define ROUNDS_SECONDS 35	/* no new round after this */

/* What disks like; the better one of the two counts. */
static const struct geometry geometries[2] = { { 8, MIB }, { 4, 4 * MIB } };

static struct {
	char data[4000], spare[4000];	/* the file, and a second one */
	uint64_t size;
	struct pen_device *host, *device;
	unsigned char *stage;
	void *made;			/* host memory that holds the pattern */
	void *memory;			/* of the device */
	struct gpu gpu;
	bool has_gpu;
	int cached, direct;		/* descriptors of the file */
} demo;

enum operation { WRITE, COLD, HALF, WARM, SAVE, OPERATIONS };

static const char *const titles[OPERATIONS] = {
	"write, durable", "read, cold", "read, half cached", "read, warm", "save back, durable",
};
static struct pen_report reports[OPERATIONS];	/* of the last round */

static void record_of(enum operation operation, const char *what, double value)
{
	char name[48];

	snprintf(name, sizeof(name), "%d.%s", operation, what);
	record(name, value);
}

static double median_for(enum operation operation, const char *what)
{
	char name[48];

	snprintf(name, sizeof(name), "%d.%s", operation, what);
	return median_of(name);
}

/* ------------------------------------------------------------------------- the operations -- */

/* A new file, from nothing to durable. Removing an old one is not in the time. */
static void put(enum operation operation, const char *path, struct pen_device *from, void *memory)
{
	struct pen_report *report = &reports[operation];
	struct pen_extent all = { .memory = memory, .length = demo.size };
	struct pen_error err;
	double start;

	unlink(path);
	*report = (struct pen_report)PEN_REPORT_INIT;
	start = now();
	check(pen_object_open(path, PEN_WRITE, demo.size, &all.object, &err), &err);
	check(pen_transfer(PEN_WRITE, from, &all, 1, NULL, report, &err), &err);
	check(pen_object_commit(all.object, &err), &err);
	record_of(operation, "rate", gb_per_s(demo.size, now() - start));
	record_of(operation, "cpu", report->cpu_seconds);
	pen_object_close(all.object);
	check_file(path, demo.size, titles[operation]);
}

static void get(enum operation operation)
{
	struct pen_report *report = &reports[operation];
	struct pen_extent all = { .memory = demo.memory, .length = demo.size };
	struct pen_error err;
	double start;

	/* Other bytes first, so that what does not arrive shows. */
	if (demo.has_gpu)
		gpu_poison(&demo.gpu, demo.memory, demo.size);
	else
		memset(demo.memory, 0xEE, demo.size);
	*report = (struct pen_report)PEN_REPORT_INIT;
	start = now();
	check(pen_object_open(demo.data, PEN_READ, 0, &all.object, &err), &err);
	check(pen_transfer(PEN_READ, demo.device, &all, 1, NULL, report, &err), &err);
	record_of(operation, "rate", gb_per_s(demo.size, now() - start));
	record_of(operation, "cpu", report->cpu_seconds);
	pen_object_close(all.object);
	check_memory(demo.device, demo.memory, demo.size, titles[operation]);
}

static void open_data(void)
{
	demo.cached = open(demo.data, O_RDONLY);
	if (demo.cached < 0)
		die("%s: %s", demo.data, strerror(errno));
	demo.direct = open_direct(demo.data);
}

/*
 * The ceilings. Bytes that end in host memory, or begin there, have to reach all of it, so the
 * plain loops work on the same memory; those for a GPU go through a small stage.
 */
static double write_ceiling(bool from_gpu)
{
	double least = INFINITY;

	for (int i = 0; i < 2; i++) {
		least = fmin(least, raw_write(demo.spare, geometries[i], demo.size,
					      from_gpu ? demo.stage : demo.made,
					      from_gpu ? FROM_STAGE : FROM_MEMORY));
		unlink(demo.spare);
	}
	return gb_per_s(demo.size, least);
}

static double cold_seconds(void)
{
	double least = INFINITY;

	make_range_cold(demo.cached, 0, 0);
	for (int i = 0; i < 2; i++)
		least = fmin(least, demo.has_gpu ? raw_read(demo.direct, geometries[i], 0,
							    demo.size, demo.stage)
						 : raw_read_to(demo.direct, geometries[i], 0,
							       demo.size, demo.memory));
	return least;
}

static double warm_seconds(void)
{
	long processors = sysconf(_SC_NPROCESSORS_ONLN);
	struct geometry geometry = { processors > 16 ? 16 : (int)processors, MIB };

	make_warm(demo.cached, demo.size);
	return demo.has_gpu ? gpu_copy(&demo.gpu, true, demo.memory, demo.size, 2)
			    : raw_read_to(demo.cached, geometry, 0, demo.size, demo.memory);
}

static void one_round(void)
{
	double cold, warm;

	record_of(WRITE, "ceiling", write_ceiling(false));
	put(WRITE, demo.data, demo.host, demo.made);
	open_data();

	cold = cold_seconds();
	record_of(COLD, "ceiling", gb_per_s(demo.size, cold));
	make_range_cold(demo.cached, 0, 0);
	get(COLD);

	warm = warm_seconds();
	record_of(WARM, "ceiling", gb_per_s(demo.size, warm));
	get(WARM);

	/* Both halves at once: the slower one sets the pace. */
	make_range_cold(demo.cached, 0, demo.size / 2);
	record_of(HALF, "ceiling", gb_per_s(demo.size, fmax(cold, warm) / 2));
	get(HALF);
	close(demo.cached);
	close(demo.direct);

	record_of(SAVE, "ceiling", write_ceiling(demo.has_gpu));
	put(SAVE, demo.spare, demo.device, demo.memory);
	unlink(demo.spare);
}

/* ------------------------------------------------------------------------------- the words -- */

static const char *paths_text(const struct pen_report *report, char *text, size_t size)
{
	text[0] = '\0';
	for (uint32_t i = 0; i < report->path_count; i++) {
		size_t used = strlen(text);

		snprintf(text + used, size - used, "%s%s", i ? " + " : "", report->paths[i].path);
	}
	return text;
}

/* Is this the first of all reports, in order, that refused the path for this reason? */
static bool first_refusal(int operation, uint32_t index)
{
	const struct pen_path *refused = &reports[operation].refused[index];

	for (int o = 0; o < operation; o++)
		for (uint32_t i = 0; i < reports[o].refused_count; i++)
			if (!strcmp(reports[o].refused[i].path, refused->path) &&
			    !strcmp(reports[o].refused[i].reason, refused->reason))
				return false;
	return true;
}

static void print_table(int rounds)
{
	char paths[128];

	printf("\n%-20s %-24s %6s   %-18s %8s %9s\n", "operation", "path", "GB/s",
	       "share of ceiling", "CPU s", "pinned");
	for (int o = 0; o < OPERATIONS; o++) {
		double ceiling = median_for(o, "ceiling");
		double rate = median_for(o, "rate");

		printf("%-20s %-24s %6.2f   %4.0f %% of %5.2f     %8.2f %9s\n", titles[o],
		       paths_text(&reports[o], paths, sizeof(paths)), rate, 100 * rate / ceiling,
		       ceiling, median_for(o, "cpu"), size_text(reports[o].pinned_bytes));
	}
	printf("\nMedians of %d rounds. Ceilings are plain loops of the same minute: for cold and\n"
	       "durable O_DIRECT, the better of %s and %s, flush included; for warm\n%s.\n",
	       rounds, geometry_text(geometries[0]), geometry_text(geometries[1]),
	       demo.has_gpu ? "copies from pinned memory"
			    : "a pread thread per processor");
}

static void print_reasons(void)
{
	bool any = false;

	printf("\nWhy these paths\n");
	for (int o = 0; o < OPERATIONS; o++)
		for (uint32_t i = 0; i < reports[o].path_count; i++)
			printf("  %-20s %s, %s: %s\n", i ? "" : titles[o], reports[o].paths[i].path,
			       size_text(reports[o].paths[i].bytes), reports[o].paths[i].reason);
	for (int o = 0; o < OPERATIONS; o++)
		for (uint32_t i = 0; i < reports[o].refused_count; i++) {
			if (!first_refusal(o, i))
				continue;
			if (!any)
				printf("Better paths that could not be had\n");
			any = true;
			printf("  %-20s %s: %s\n", titles[o], reports[o].refused[i].path,
			       reports[o].refused[i].reason);
		}
	if (!any)
		printf("No better path was refused.\n");
}

/* --------------------------------------------------------------------------------- set-up -- */

static void remove_files(void)
{
	unlink(demo.data);
	unlink(demo.spare);
}

static void open_device(void)
{
	struct pen_error err;

	check(pen_device_open("host", &demo.host, &err), &err);
	demo.has_gpu = !pen_device_open("cuda:0", &demo.device, &err) &&
		       !pen_device_ready(demo.device, &err);
	if (demo.has_gpu) {
		printf("Penstock %s: %s between disk and the memory of cuda:0\n", pen_version(),
		       size_text(demo.size));
		check(gpu_open(&demo.gpu, 0, demo.stage, &err), &err);
	} else {
		printf("Penstock %s: %s between disk and host memory; no GPU: %s\n", pen_version(),
		       size_text(demo.size), err.message);
		check(pen_device_open("host", &demo.device, &err), &err);
	}
}

/* The pattern, by a job of its own: bytes to write. */
static void make_bytes(void)
{
	struct pen_extent all = { .length = demo.size };
	struct pen_error err;
	char name[64];

	snprintf(name, sizeof(name), "pattern:%llu", (unsigned long long)demo.size);
	check(pen_device_alloc(demo.host, demo.size, &demo.made, &err), &err);
	check(pen_device_alloc(demo.device, demo.size, &demo.memory, &err), &err);
	all.memory = demo.made;
	check(pen_object_open(name, PEN_READ, 0, &all.object, &err), &err);
	check(pen_transfer(PEN_READ, demo.host, &all, 1, NULL, NULL, &err), &err);
	pen_object_close(all.object);
}

int main(int argc, char **argv)
{
	double start = now();
	int rounds = 0;

	demo.size = GIB;
	if (argc < 2 || argc > 3 || (argc == 3 && text_to_size(argv[2], &demo.size)) ||
	    demo.size < 16 * MIB) {
		fputs("usage: demo DIRECTORY [SIZE]\n", stderr);
		return 2;
	}
	demo.size = demo.size / (2 * MIB) * (2 * MIB);
	snprintf(demo.data, sizeof(demo.data), "%s/demo.bin", argv[1]);
	snprintf(demo.spare, sizeof(demo.spare), "%s/demo.plain", argv[1]);
	need_room(argv[1], 3 * demo.size);
	atexit(remove_files);

	demo.stage = huge_memory(STAGE_SIZE);
	open_device();
	make_bytes();
	while (rounds < ROUNDS && (!rounds || now() - start < ROUNDS_SECONDS)) {
		one_round();
		rounds++;
	}
	print_table(rounds);
	print_reasons();

	pen_device_free(demo.host, demo.made, demo.size, NULL);
	pen_device_free(demo.device, demo.memory, demo.size, NULL);
	gpu_close(&demo.gpu);
	pen_device_close(demo.device);
	pen_device_close(demo.host);
	return 0;
}

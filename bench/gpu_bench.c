/* SPDX-License-Identifier: MIT */
/*
 * What Penstock reaches on a machine with a GPU, beside what the hardware gives to plain loops.
 *
 * Disks are shared and clocks drift, so a figure alone says little: contenders take turns, round
 * by round, in one process with the GPU's context up, and only ratios of medians are judged. Who
 * goes first changes with the round. GPU memory is filled with other bytes before each read, and
 * a page of each MiB is compared with the pattern afterwards, so a fast wrong answer shows.
 *
 * Phases: memory, warm, cold, half, small, write, cores. Each can be asked for alone (--only);
 * "memory" comes first because it needs a process in which the engine has not worked yet.
 */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <math.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/text.h"
#include "ceiling.h"

#define STRIPE (64 * MIB)
#define SMALL_READS 200
#define SMALL_WARMUP 20

static struct {
	const char *dir, *json, *only, *program;
	char data[4000], out[4000];		/* the file that is read, the one that is written */
	uint64_t size;
	int rounds, device;
	bool two_cores;
	double limit, start;			/* seconds */
	FILE *log;

	unsigned char *stage;
	struct gpu gpu;
	struct pen_device *target;
	void *memory;				/* of the GPU, `size` bytes */
	int cached, direct;			/* descriptors of the data file */
	struct geometry best_read[2], best_write[2];
} bench = { .dir = ".", .size = 8 * GIB, .rounds = 5, .limit = 420 };

/* One who takes turns with others. */
struct contender {
	const char *name;			/* of its series; NULL: nobody */
	double (*run)(const struct contender *contender);	/* GB/s */
	struct geometry geometry;
	int transfer;
	uint32_t lanes;
	int streams;
};

__attribute__((format(printf, 1, 2)))
static void note(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vfprintf(bench.log, format, args);
	va_end(args);
	fflush(bench.log);
}

__attribute__((format(printf, 1, 2)))
static void say(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	fflush(stdout);
	if (bench.log == stdout)
		return;
	va_start(args, format);
	vfprintf(bench.log, format, args);
	va_end(args);
	fflush(bench.log);
}

__attribute__((format(printf, 2, 3)))
static void record_as(double value, const char *format, ...)
{
	char name[64];
	va_list args;

	va_start(args, format);
	vsnprintf(name, sizeof(name), format, args);
	va_end(args);
	record(name, value);
}

__attribute__((format(printf, 1, 2)))
static double med(const char *format, ...)
{
	char name[64];
	va_list args;

	va_start(args, format);
	vsnprintf(name, sizeof(name), format, args);
	va_end(args);
	return median_of(name);
}

static bool wanted(const char *phase)
{
	return !bench.only || strstr(bench.only, phase);
}

/* Rounds are given up, down to two, rather than the end of the run. */
static bool more_rounds(int round)
{
	return round < bench.rounds && (round < 2 || now() - bench.start < bench.limit);
}

static void take_turns(const struct contender *contenders, int count)
{
	for (int round = 0; more_rounds(round); round++)
		for (int i = 0; i < count; i++) {
			const struct contender *who = &contenders[(i + round) % count];
			double rate = who->run(who);

			if (isnan(rate))
				continue;
			record(who->name, rate);
			note("  round %d  %-24s %8.3f GB/s\n", round + 1, who->name, rate);
			if (bench.two_cores)
				note("record %s %.6f\n", who->name, rate);
		}
}

/* ---------------------------------------------------------------------------- Penstock -- */

static void note_report(const char *name, const struct pen_report *report, double wall, double cpu)
{
	double gb = (double)report->bytes / 1e9;

	note("    %s: wall %.4f s, engine %.4f s (setup %.4f), CPU-s/GB %.4f (process %.4f), "
	     "lanes %u, pinned %s, requests %llu of %s, depth %u, retries %llu, "
	     "p50 %.0f p99 %.0f max %.0f us\n",
	     name, wall, report->seconds, report->setup_seconds, report->cpu_seconds / gb,
	     cpu / gb, report->lanes, size_text(report->pinned_bytes),
	     (unsigned long long)report->requests, size_text(report->request_size), report->depth,
	     (unsigned long long)report->retries, report->latency_us_p50, report->latency_us_p99,
	     report->latency_us_max);
	for (uint32_t i = 0; i < report->path_count; i++)
		note("      %-16s %10s  %s\n", report->paths[i].path,
		     size_text(report->paths[i].bytes), report->paths[i].reason);
	for (uint32_t i = 0; i < report->refused_count; i++)
		note("      no %-13s %10s  %s\n", report->refused[i].path, "",
		     report->refused[i].reason);
	record_as(report->cpu_seconds / gb, "%s.cpu", name);
	record_as(cpu / gb, "%s.process_cpu", name);
	record_as(report->lanes, "%s.lanes", name);
	record_as((double)report->pinned_bytes, "%s.pinned", name);
	record_as(report->request_size, "%s.request", name);
	record_as(report->depth, "%s.depth", name);
}

/* The whole file into the GPU: opening it is in the time. NAN where the type is refused. */
static double penstock_read(const struct contender *contender)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_extent all = { .memory = bench.memory, .length = bench.size };
	struct pen_error err;
	double wall, cpu;
	int rc;

	options.transfer = contender->transfer;
	options.lanes = contender->lanes;
	gpu_poison(&bench.gpu, bench.memory, bench.size);
	cpu = cpu_now();
	wall = now();
	check(pen_object_open(bench.data, PEN_READ, 0, &all.object, &err), &err);
	rc = pen_transfer(PEN_READ, bench.target, &all, 1, &options, &report, &err);
	wall = now() - wall;
	cpu = cpu_now() - cpu;
	pen_object_close(all.object);
	if (rc) {
		char text[1024];

		pen_error_format(&err, text, sizeof(text));
		note("    %s: %s\n", contender->name, text);
		if (contender->transfer == PEN_AUTO)
			die("%s", text);
		return NAN;
	}
	note_report(contender->name, &report, wall, cpu);
	check_memory(bench.target, bench.memory, bench.size, contender->name);
	return gb_per_s(bench.size, wall);
}

/* GPU memory to a new file, from nothing to durable. */
static double penstock_write(const struct contender *contender)
{
	struct pen_report report = PEN_REPORT_INIT;
	uint64_t size = bench.size / 2;
	struct pen_extent all = { .memory = bench.memory, .length = size };
	struct pen_error err;
	double start, opened, written, done, cpu;

	unlink(bench.out);
	cpu = cpu_now();
	start = now();
	check(pen_object_open(bench.out, PEN_WRITE, size, &all.object, &err), &err);
	opened = now();
	check(pen_transfer(PEN_WRITE, bench.target, &all, 1, NULL, &report, &err), &err);
	written = now();
	check(pen_object_commit(all.object, &err), &err);
	done = now();
	cpu = cpu_now() - cpu;
	pen_object_close(all.object);
	note("    %s: open %.4f s, transfer %.4f s, commit %.4f s\n", contender->name,
	     opened - start, written - opened, done - written);
	note_report(contender->name, &report, done - start, cpu);
	check_file(bench.out, size, contender->name);
	unlink(bench.out);
	return gb_per_s(size, done - start);
}

/* ---------------------------------------------------------------------------- ceilings -- */

static double copy_to_gpu(const struct contender *contender)
{
	return gb_per_s(bench.size,
			gpu_copy(&bench.gpu, true, bench.memory, bench.size, contender->streams));
}

static double copy_from_gpu(const struct contender *contender)
{
	return gb_per_s(bench.size, gpu_copy(&bench.gpu, false, bench.memory, bench.size,
					     contender->streams));
}

static double cold_raw(const struct contender *contender)
{
	make_cold(bench.cached);
	return gb_per_s(bench.size,
			raw_read(bench.direct, contender->geometry, 0, bench.size, bench.stage));
}

static double cold_penstock(const struct contender *contender)
{
	make_cold(bench.cached);
	return penstock_read(contender);
}

static double write_raw(const struct contender *contender)
{
	uint64_t size = bench.size / 2;
	double rate = gb_per_s(size, raw_write(bench.out, contender->geometry, size, bench.stage,
					       FROM_STAGE));

	unlink(bench.out);
	return rate;
}

static double two_plain_threads(const struct contender *contender)
{
	double rate;

	gpu_poison(&bench.gpu, bench.memory, bench.size);
	rate = gb_per_s(bench.size, gpu_plain_read(&bench.gpu, bench.cached, bench.memory,
						   bench.size, 2));
	check_memory(bench.target, bench.memory, bench.size, contender->name);
	return rate;
}

/* Try geometries on a part of the file, twice, and keep the best two. */
static void sweep(bool writing, const struct geometry *tried, int count, struct geometry best[2])
{
	uint64_t part = bench.size / 4 / MIB * MIB;
	const char *kind = writing ? "write" : "read";
	char name[64];
	double first = -1, second = -1;

	if (!writing)
		make_cold(bench.cached);
	for (int round = 0; round < 2; round++)
		for (int i = 0; i < count; i++) {
			double rate;

			if (writing) {
				rate = gb_per_s(part, raw_write(bench.out, tried[i], part,
								bench.stage, FROM_STAGE));
				unlink(bench.out);
			} else {
				/* Another part each time: nothing below us may remember it. */
				rate = gb_per_s(part, raw_read(bench.direct, tried[i],
							       (uint64_t)(i + round) % 4 * part,
							       part, bench.stage));
			}
			record_as(rate, "sweep.%s.%s", kind, geometry_text(tried[i]));
			note("  sweep %s %-12s %8.3f GB/s\n", kind, geometry_text(tried[i]), rate);
		}
	for (int i = 0; i < count; i++) {
		double rate;

		snprintf(name, sizeof(name), "sweep.%s.%s", kind, geometry_text(tried[i]));
		rate = median_of(name);
		if (rate > first) {
			second = first;
			best[1] = best[0];
			first = rate;
			best[0] = tried[i];
		} else if (rate > second) {
			second = rate;
			best[1] = tried[i];
		}
	}
}

/* ------------------------------------------------------------------------------ phases -- */

static void warm_up(void)
{
	double start = now();

	make_warm(bench.cached, bench.size);
	note("  warmed up in %.2f s: %s cached\n", now() - start,
	     size_text(cached_bytes(bench.cached, bench.size)));
}

/* The first jobs of the process: what do they add to its memory? */
static void phase_memory(void)
{
	static const struct contender jobs[] = {
		{ "first.warm", penstock_read, .transfer = PEN_AUTO },
		{ "first.cold", cold_penstock, .transfer = PEN_AUTO },
		{ "first.write", penstock_write },
	};
	uint64_t before, peak, after;

	note("memory\n");
	warm_up();
	before = anonymous_memory();
	memory_watch_start();
	for (int i = 0; i < 3; i++) {
		double rate = jobs[i].run(&jobs[i]);

		record(jobs[i].name, rate);
		note("  %-24s %8.3f GB/s\n", jobs[i].name, rate);
	}
	peak = memory_watch_stop();
	after = anonymous_memory();
	record("memory.peak_growth", (double)(peak > before ? peak - before : 0));
	record("memory.growth", (double)(after > before ? after - before : 0));
	say("Memory: anonymous %s before the first job, %s at most during the first three, %s "
	    "after; pinned %s at most\n", size_text(before), size_text(peak), size_text(after),
	    size_text((uint64_t)fmax(fmax(most_of("first.warm.pinned"),
					  most_of("first.cold.pinned")),
				     most_of("first.write.pinned"))));
	say("First jobs of the process: warm %.2f GB/s, cold %.2f GB/s, write %.2f GB/s\n",
	    first_of("first.warm"), first_of("first.cold"), first_of("first.write"));
}

static double h2d_ceiling(void)
{
	return fmax(med("ceiling.h2d.1"), med("ceiling.h2d.2"));
}

static void say_warm(const struct contender *contenders, int count)
{
	say("\nWarm file of %s into the GPU (pinned copies reach %.2f GB/s in, %.2f out)\n",
	    size_text(bench.size), h2d_ceiling(), median_of("ceiling.d2h"));
	say("  %-20s %8s %8s %10s %10s %6s %10s\n", "", "GB/s", "share", "CPU-s/GB", "process",
	    "lanes", "pinned");
	for (int i = 0; i < count; i++) {
		const char *name = contenders[i].name;

		if (contenders[i].run != penstock_read)
			continue;
		if (!recorded(name)) {
			say("  %-20s refused, see the log\n", name);
			continue;
		}
		say("  %-20s %8.2f %7.1f%% %10.4f %10.4f %6.0f %10s\n", name, median_of(name),
		    100 * median_of(name) / h2d_ceiling(), med("%s.cpu", name),
		    med("%s.process_cpu", name), med("%s.lanes", name),
		    size_text((uint64_t)med("%s.pinned", name)));
	}
}

static void phase_warm(void)
{
	static const struct contender contenders[] = {
		{ "ceiling.h2d.1", copy_to_gpu, .streams = 1 },
		{ "warm.auto", penstock_read, .transfer = PEN_AUTO },
		{ "ceiling.h2d.2", copy_to_gpu, .streams = 2 },
		{ "warm.auto.4", penstock_read, .transfer = PEN_AUTO, .lanes = 4 },
		{ "warm.auto.8", penstock_read, .transfer = PEN_AUTO, .lanes = 8 },
		{ "warm.auto.12", penstock_read, .transfer = PEN_AUTO, .lanes = 12 },
		{ "ceiling.d2h", copy_from_gpu, .streams = 1 },
		{ "warm.cached", penstock_read, .transfer = PEN_CPU_CACHED_GPU },
		{ "warm.cached.4", penstock_read, .transfer = PEN_CPU_CACHED_GPU, .lanes = 4 },
		{ "warm.cached.8", penstock_read, .transfer = PEN_CPU_CACHED_GPU, .lanes = 8 },
		{ "warm.cached.12", penstock_read, .transfer = PEN_CPU_CACHED_GPU, .lanes = 12 },
		{ "warm.mapped", penstock_read, .transfer = PEN_MAPPED },
	};
	int count = sizeof(contenders) / sizeof(contenders[0]);

	note("\nwarm\n");
	warm_up();
	/* Once for nothing: pools fill, clocks rise. */
	contenders[0].run(&contenders[0]);
	contenders[1].run(&(struct contender){ "warm.first", .transfer = PEN_AUTO });
	take_turns(contenders, count);
	say_warm(contenders, count);
}

static double disk_ceiling(void)
{
	return fmax(median_of("cold.raw.best"), median_of("cold.raw.second"));
}

static void say_job(const char *name, double ceiling)
{
	say("  penstock             %8.2f GB/s %6.1f%%  CPU-s/GB %.4f, lanes %.0f, %s x %.0f, "
	    "pinned %s\n", median_of(name), 100 * median_of(name) / ceiling, med("%s.cpu", name),
	    med("%s.lanes", name), size_text((uint64_t)med("%s.request", name)),
	    med("%s.depth", name), size_text((uint64_t)med("%s.pinned", name)));
}

static void phase_cold(void)
{
	static const struct geometry tried[] = {
		{ 1, 4 * MIB }, { 4, MIB }, { 4, 4 * MIB }, { 8, MIB }, { 8, 2 * MIB },
		{ 8, 4 * MIB }, { 16, MIB },
	};
	int count = sizeof(tried) / sizeof(tried[0]);

	note("\ncold (caches dropped by %s)\n", make_cold(bench.cached));
	note("  %s cached\n", size_text(cached_bytes(bench.cached, bench.size)));
	sweep(false, tried, count, bench.best_read);
	{
		const struct contender contenders[] = {
			{ "cold.raw.best", cold_raw, .geometry = bench.best_read[0] },
			{ "cold.penstock", cold_penstock, .transfer = PEN_AUTO },
			{ "cold.raw.second", cold_raw, .geometry = bench.best_read[1] },
		};

		take_turns(contenders, 3);
	}
	say("\nCold file of %s into the GPU\n  plain O_DIRECT reads of a quarter:",
	    size_text(bench.size));
	for (int i = 0; i < count; i++)
		say(" %s %.2f%s", geometry_text(tried[i]),
		    med("sweep.read.%s", geometry_text(tried[i])), i + 1 < count ? "," : "\n");
	for (int i = 0; i < 2; i++)
		say("  plain %-14s %8.2f GB/s\n", geometry_text(bench.best_read[i]),
		    median_of(i ? "cold.raw.second" : "cold.raw.best"));
	say_job("cold.penstock", disk_ceiling());
}

static void cool_first_half(void)
{
	make_range_cold(bench.cached, 0, bench.size / 2);
}

static void cool_stripes(void)
{
	for (uint64_t at = 0; at < bench.size; at += 2 * STRIPE)
		make_range_cold(bench.cached, at, STRIPE);
}

/* Around the page cache, so that what it holds stays as the others left it. */
static double half_raw(const struct contender *contender)
{
	return gb_per_s(bench.size / 2, raw_read(bench.direct, contender->geometry, 0,
						 bench.size / 2, bench.stage));
}

static double half_first(const struct contender *contender)
{
	cool_first_half();
	note("    %s cached\n", size_text(cached_bytes(bench.cached, bench.size)));
	return penstock_read(contender);
}

static double half_stripes(const struct contender *contender)
{
	cool_stripes();
	note("    %s cached\n", size_text(cached_bytes(bench.cached, bench.size)));
	return penstock_read(contender);
}

static double half_seconds(const char *name)
{
	return (double)bench.size / 1e9 / median_of(name);
}

/* How many times the larger part a half-cached read took, with the disk at `disk` GB/s. */
static double half_ratio(const char *name, double disk)
{
	double half = (double)bench.size / 2 / 1e9;

	return half_seconds(name) / fmax(half / disk, half / median_of("warm.auto"));
}

/* The disk as the plain loops found it in the rounds of this layout. */
static double half_disk(const char *name)
{
	return fmax(med("%s.raw.best", name), med("%s.raw.second", name));
}

static void half_layout(const char *name, double (*run)(const struct contender *),
			const char *best, const char *second)
{
	const struct contender contenders[] = {
		{ best, half_raw, .geometry = bench.best_read[0] },
		{ name, run, .transfer = PEN_AUTO },
		{ second, half_raw, .geometry = bench.best_read[1] },
	};

	warm_up();
	take_turns(contenders, 3);
	say("  %-14s %.3f s, CPU-s/GB %.4f; a cold half by plain reads %.3f s, so %.3f x\n", name,
	    half_seconds(name), med("%s.cpu", name),
	    (double)bench.size / 2 / 1e9 / half_disk(name), half_ratio(name, half_disk(name)));
	if (!isnan(disk_ceiling()))
		say("  %14s (%.3f x, were the disk still as fast as in the cold phase)\n", "",
		    half_ratio(name, disk_ceiling()));
}

static void phase_half(void)
{
	if (!bench.best_read[0].threads) {
		bench.best_read[0] = (struct geometry){ 8, MIB };
		bench.best_read[1] = (struct geometry){ 4, MIB };
	}
	note("\nhalf cached\n");
	say("\nHalf cached, %s into the GPU: the first half cold, or every other 64 MiB\n",
	    size_text(bench.size));
	half_layout("half.first", half_first, "half.first.raw.best", "half.first.raw.second");
	half_layout("half.stripes", half_stripes, "half.stripes.raw.best",
		    "half.stripes.raw.second");
}

/* One MiB into the GPU: by Penstock, and by a read and a copy. Milliseconds each. */
static void small_reads(const char *name, bool cold)
{
	struct pen_extent one = { .memory = bench.memory, .length = MIB };
	int fd = cold ? bench.direct : bench.cached;
	uint64_t places = bench.size / MIB;
	struct pen_error err;

	check(pen_object_open(bench.data, PEN_READ, 0, &one.object, &err), &err);
	for (uint64_t i = 0; i < SMALL_READS + SMALL_WARMUP; i++) {
		struct pen_report report = PEN_REPORT_INIT;
		uint64_t plain = (2 * i * 37) % places * MIB;
		double start = now(), raw, whole;

		one.offset = ((2 * i + 1) * 37) % places * MIB;
		if (pread(fd, bench.stage, MIB, (off_t)plain) != MIB)
			die("read 1 MiB: %s", strerror(errno));
		gpu_copy(&bench.gpu, true, bench.memory, MIB, 1);
		raw = now() - start;
		start = now();
		check(pen_transfer(PEN_READ, bench.target, &one, 1, NULL, &report, &err), &err);
		whole = now() - start;
		if (i < SMALL_WARMUP)
			continue;
		record_as(1e3 * whole, "small.%s.ms", name);
		record_as(1e3 * raw, "small.%s.raw_ms", name);
		if (i == SMALL_WARMUP)
			note_report("small", &report, whole, 0);
	}
	pen_object_close(one.object);
	say("  %-4s %.3f ms; a plain read and a copy take %.3f ms; slowest %.3f ms\n", name,
	    med("small.%s.ms", name), med("small.%s.raw_ms", name),
	    most_of(cold ? "small.cold.ms" : "small.hot.ms"));
}

static void phase_small(void)
{
	note("\nsmall\n");
	say("\n1 MiB into the GPU, median of %d\n", SMALL_READS);
	warm_up();
	small_reads("hot", false);
	make_cold(bench.cached);
	small_reads("cold", true);
}

static double write_ceiling(void)
{
	return fmax(median_of("write.raw.best"), median_of("write.raw.second"));
}

static void phase_write(void)
{
	static const struct geometry tried[] = { { 4, MIB }, { 8, MIB }, { 4, 4 * MIB } };

	note("\nwrite\n");
	/* The bytes to write: the pattern, which a read brings. */
	penstock_read(&(struct contender){ "write.source", .transfer = PEN_AUTO });
	sweep(true, tried, 3, bench.best_write);
	{
		const struct contender contenders[] = {
			{ "write.raw.best", write_raw, .geometry = bench.best_write[0] },
			{ "write.penstock", penstock_write },
			{ "write.raw.second", write_raw, .geometry = bench.best_write[1] },
		};

		take_turns(contenders, 3);
	}
	say("\nGPU to a new durable file of %s\n", size_text(bench.size / 2));
	for (int i = 0; i < 2; i++)
		say("  plain %-14s %8.2f GB/s\n", geometry_text(bench.best_write[i]),
		    median_of(i ? "write.raw.second" : "write.raw.best"));
	say_job("write.penstock", write_ceiling());
}

/* Two processors that are not two halves of one core. */
static void pick_two(cpu_set_t *two)
{
	cpu_set_t all;
	char path[] = "/sys/devices/system/cpu/cpu0000/topology/thread_siblings_list";
	int first = -1, sibling = -1;
	FILE *file;

	CPU_ZERO(two);
	sched_getaffinity(0, sizeof(all), &all);
	for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(two) < 2; cpu++) {
		if (!CPU_ISSET(cpu, &all) || (cpu == sibling && CPU_COUNT(&all) > 2))
			continue;
		CPU_SET(cpu, two);
		if (first >= 0)
			break;
		first = cpu;
		snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu%d/topology/"
			 "thread_siblings_list", cpu % 10000);
		file = fopen(path, "r");
		if (file && fscanf(file, "%*d%*[,-]%d", &sibling) != 1)
			sibling = -1;
		if (file)
			fclose(file);
	}
}

/* The process that has two processors: its values go to standard output for the other one. */
static void run_two_cores(void)
{
	static const struct contender contenders[] = {
		{ "cores.plain", two_plain_threads },
		{ "cores.penstock", penstock_read, .transfer = PEN_AUTO },
	};

	contenders[0].run(&contenders[0]);
	contenders[1].run(&(struct contender){ "cores.first", .transfer = PEN_AUTO });
	take_turns(contenders, 2);
	note("record cores.penstock.cpu %.6f\nrecord cores.penstock.lanes %.6f\n",
	     median_of("cores.penstock.cpu"), median_of("cores.penstock.lanes"));
}

static void phase_cores(void)
{
	char line[512], name[64], size[32], rounds[16], device[16];
	cpu_set_t two;
	double value;
	int pipes[2], status;
	FILE *child;
	pid_t pid;

	note("\ntwo cores\n");
	warm_up();
	pick_two(&two);
	snprintf(size, sizeof(size), "%llu", (unsigned long long)bench.size);
	snprintf(rounds, sizeof(rounds), "%d", bench.rounds);
	snprintf(device, sizeof(device), "%d", bench.device);
	fflush(NULL);
	if (pipe(pipes) || (pid = fork()) < 0)
		die("a second process could not be started: %s", strerror(errno));
	if (!pid) {
		dup2(pipes[1], STDOUT_FILENO);
		close(pipes[0]);
		close(pipes[1]);
		sched_setaffinity(0, sizeof(two), &two);
		execl("/proc/self/exe", bench.program, "--two-cores", "--dir", bench.dir, "--size",
		      size, "--rounds", rounds, "--device", device, NULL);
		_exit(127);
	}
	close(pipes[1]);
	child = fdopen(pipes[0], "r");
	while (child && fgets(line, sizeof(line), child)) {
		if (sscanf(line, "record %63s %lf", name, &value) == 2)
			record(name, value);
		else
			note("%s", line);
	}
	if (child)
		fclose(child);
	waitpid(pid, &status, 0);
	if (status) {
		say("\nTwo cores: the process ended with status %d, see the log\n", status);
		return;
	}
	say("\nTwo cores, warm: two plain pread threads %.2f GB/s, penstock %.2f GB/s (%.2f x), "
	    "CPU-s/GB %.4f\n", median_of("cores.plain"), median_of("cores.penstock"),
	    median_of("cores.penstock") / median_of("cores.plain"),
	    median_of("cores.penstock.cpu"));
}

/* ----------------------------------------------------------------------------- targets -- */

static int missed;
static FILE *json;
static int targets;

/* One line of the last table. `at_least`: more is better. */
static void target(const char *what, double value, double limit, bool at_least, const char *unit)
{
	const char *verdict = isnan(value)	       ? "not measured"
			      : at_least ? value >= limit ? "MET" : "MISSED"
					 : value <= limit ? "MET" : "MISSED";

	if (isnan(value) && bench.only)
		return;
	missed += !strcmp(verdict, "MISSED");
	say("  %-58s %9.3f %s %-8.4g %-8s %s\n", what, value, at_least ? ">=" : "<=", limit, unit,
	    verdict);
	if (json && !isnan(value))
		fprintf(json, "%s\n  {\"target\": \"%s\", \"value\": %.6g, \"%s\": %.6g, "
			"\"unit\": \"%s\", \"verdict\": \"%s\"}", targets++ ? "," : "", what, value,
			at_least ? "at_least" : "at_most", limit, unit, verdict);
}

static double most_pinned(void)
{
	static const char *const jobs[] = {
		"first.warm.pinned", "first.cold.pinned", "first.write.pinned", "warm.auto.pinned",
		"cold.penstock.pinned", "half.first.pinned", "half.stripes.pinned",
		"write.penstock.pinned",
	};
	double most = NAN;

	for (size_t i = 0; i < sizeof(jobs) / sizeof(jobs[0]); i++)
		most = fmax(most, most_of(jobs[i]));
	return most / (double)MIB;
}

static void judge(void)
{
	double small = fmax(median_of("small.hot.ms") - median_of("small.hot.raw_ms"),
			    median_of("small.cold.ms") - median_of("small.cold.raw_ms"));

	if (bench.json) {
		json = fopen(bench.json, "w");
		if (!json)
			die("%s: %s", bench.json, strerror(errno));
		fprintf(json, "{\"size\": %llu, \"rounds\": %d, \"targets\": [",
			(unsigned long long)bench.size, bench.rounds);
	}
	say("\nTargets%s\n",
	    bench.size < 8 * GIB ? " (stated for 8 GiB and more, which this is not)" : "");
	target("warm: share of the pinned copy ceiling (goal 94)",
	       100 * median_of("warm.auto") / h2d_ceiling(), 88, true, "%");
	target("warm: lanes", median_of("warm.auto.lanes"), 12, false, "");
	target("warm: CPU-seconds per GB, the job's threads", median_of("warm.auto.cpu"), 0.15,
	       false, "s");
	target("warm: CPU-seconds per GB, the whole process", median_of("warm.auto.process_cpu"),
	       0.15, false, "s");
	target("cold: share of the best plain O_DIRECT read",
	       100 * median_of("cold.penstock") / disk_ceiling(), 95, true, "%");
	target("half cached, first half: times the larger part",
	       half_ratio("half.first", half_disk("half.first")), 1.15, false, "x");
	target("half cached, stripes: times the larger part",
	       half_ratio("half.stripes", half_disk("half.stripes")), 1.15, false, "x");
	target("write: share of the best plain O_DIRECT write",
	       100 * median_of("write.penstock") / write_ceiling(), 92, true, "%");
	target("two cores, warm: times two plain pread threads",
	       median_of("cores.penstock") / median_of("cores.plain"), 1.5, true, "x");
	target("pinned memory of any job", most_pinned(), 128, false, "MiB");
	target("anonymous memory: growth at its peak",
	       median_of("memory.peak_growth") / (double)MIB, 160, false, "MiB");
	target("1 MiB read, hot: whole time", median_of("small.hot.ms"), 1, false, "ms");
	target("1 MiB read: engine time beyond read and copy, worst", small, 1, false, "ms");
	if (json) {
		fputs("\n], \"series\": ", json);
		record_json(json);
		fputs("}\n", json);
		fclose(json);
	}
	say("%d missed; %.0f s in all\n", missed, now() - bench.start);
}

/* ------------------------------------------------------------------------------- set-up -- */

static const char usage[] =
	"usage: gpu_bench [--dir DIR] [--size SIZE] [--rounds N] [--quick] [--device N]\n"
	"                 [--only PHASE,...] [--limit SECONDS] [--log FILE] [--json FILE]\n"
	"Measures Penstock on a GPU beside plain loops. DIR (default .) lies on the disk to\n"
	"measure and takes 1.5 x SIZE (default 8G); --quick is --size 1G --rounds 2. Phases:\n"
	"memory, warm, cold, half, small, write, cores. After LIMIT seconds rounds are given up,\n"
	"down to two. Each round goes to the log, which is appended to; the tables go to standard\n"
	"output as well.\n";

static void parse(int argc, char **argv)
{
	static const struct option options[] = {
		{ "dir", required_argument, NULL, 'd' },
		{ "size", required_argument, NULL, 's' },
		{ "rounds", required_argument, NULL, 'r' },
		{ "quick", no_argument, NULL, 'q' },
		{ "device", required_argument, NULL, 'g' },
		{ "only", required_argument, NULL, 'o' },
		{ "limit", required_argument, NULL, 'l' },
		{ "log", required_argument, NULL, 'L' },
		{ "json", required_argument, NULL, 'j' },
		{ "two-cores", no_argument, NULL, '2' },
		{ "help", no_argument, NULL, 'h' },
		{ 0 },
	};
	int option;

	bench.log = stdout;
	while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (option) {
		case 'd': bench.dir = optarg; break;
		case 's':
			if (text_to_size(optarg, &bench.size))
				die("%s is no size", optarg);
			break;
		case 'r': bench.rounds = atoi(optarg); break;
		case 'q': bench.size = GIB, bench.rounds = 2; break;
		case 'g': bench.device = atoi(optarg); break;
		case 'o': bench.only = optarg; break;
		case 'l': bench.limit = atof(optarg); break;
		case 'L':
			bench.log = fopen(optarg, "a");
			if (!bench.log)
				die("%s: %s", optarg, strerror(errno));
			break;
		case 'j': bench.json = optarg; break;
		case '2': bench.two_cores = true; break;
		case 'h': fputs(usage, stdout); exit(0);
		default: fputs(usage, stderr); exit(2);
		}
	}
	if (optind < argc || bench.rounds < 1) {
		fputs(usage, stderr);
		exit(2);
	}
	bench.size = bench.size / (2 * STRIPE) * (2 * STRIPE);
	if (!bench.size)
		die("the size is at least %s", size_text(2 * STRIPE));
}

static void make_data(void)
{
	need_room(bench.dir, bench.size / 2 * 3 + GIB / 8);
	note("data file: %s written in %.2f s\n", size_text(bench.size),
	     raw_write(bench.data, (struct geometry){ 8, MIB }, bench.size, bench.stage,
		       FROM_PATTERN));
}

static void remove_files(void)
{
	if (bench.two_cores)
		return;
	unlink(bench.data);
	unlink(bench.out);
}

static void open_all(void)
{
	struct pen_error err;
	char name[32];
	double start = now();

	bench.stage = huge_memory(STAGE_SIZE);
	snprintf(name, sizeof(name), "cuda:%d", bench.device);
	check(pen_device_open(name, &bench.target, &err), &err);
	check(pen_device_ready(bench.target, &err), &err);
	note("device ready after %.3f s\n", now() - start);
	check(gpu_open(&bench.gpu, bench.device, bench.stage, &err), &err);
	check(pen_device_alloc(bench.target, bench.size, &bench.memory, &err), &err);
	gpu_poison(&bench.gpu, bench.memory, bench.size);
	if (!bench.two_cores)
		make_data();
	bench.cached = open(bench.data, O_RDONLY);
	bench.direct = open_direct(bench.data);
	if (bench.cached < 0)
		die("%s: %s", bench.data, strerror(errno));
}

static void close_all(void)
{
	struct pen_error err;

	close(bench.cached);
	close(bench.direct);
	check(pen_device_free(bench.target, bench.memory, bench.size, &err), &err);
	gpu_close(&bench.gpu);
	pen_device_close(bench.target);
	pen_trim();
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} phases[] = {
		{ "memory", phase_memory }, { "warm", phase_warm },   { "cold", phase_cold },
		{ "half", phase_half },	    { "small", phase_small }, { "write", phase_write },
		{ "cores", phase_cores },
	};

	bench.start = now();
	bench.program = argv[0];
	parse(argc, argv);
	snprintf(bench.data, sizeof(bench.data), "%s/penstock-bench.data", bench.dir);
	snprintf(bench.out, sizeof(bench.out), "%s/penstock-bench.out", bench.dir);
	atexit(remove_files);
	open_all();
	if (bench.two_cores) {
		run_two_cores();
		close_all();
		return 0;
	}
	for (size_t i = 0; i < sizeof(phases) / sizeof(phases[0]); i++)
		if (wanted(phases[i].name))
			phases[i].run();
	judge();
	close_all();
	return 0;
}

/* SPDX-License-Identifier: MIT */
/*
 * How fast cores code and decode, without a GPU:
 *
 *	coding_bench FILE.safetensors FOLDER
 *
 * First the loops alone, out of memory that no cache holds and into it, by one thread: gigabytes of
 * numbers, by seconds of CPU time, which other programs on the machine take nothing of. Then the
 * file: packed into FOLDER and decoded again by one thread and by all, and loaded into host memory
 * that is there already, plain and coded. FILE and FOLDER should lie in memory (tmpfs), so that no
 * disk is measured. Each figure is the median of five rounds; nothing that is written is kept.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "base/floats.h"
#include "base/planes.h"
#include "base/planes_code.h"
#include "measure.h"

#define ROUNDS 5
#define VALUES ((uint64_t)32 << 20)
#define CHUNKS (VALUES / PLANES_CHUNK)

/* -------------------------------------------------------------------------------- the loops -- */

static double thread_seconds(void)
{
	struct timespec time;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
	return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void *room(uint64_t bytes)
{
	void *memory = malloc(bytes);

	if (!memory)
		die("there is no memory of %s", size_text(bytes));
	memset(memory, 1, bytes);
	return memory;
}

static double chance(void)
{
	static uint64_t seed = 1;

	seed = seed * 6364136223846793005ull + 1442695040888963407ull;
	return ((double)(seed >> 11) + 0.5) / (double)(1ull << 53);
}

/* Normal numbers, as weights are. */
static void fill(enum planes_kind kind, void *values)
{
	for (uint64_t i = 0; i < VALUES; i++) {
		double length = sqrt(-2 * log(chance())), angle = 6.283185307 * chance();
		float number = (float)(0.02 * length * cos(angle));
		floats_single bits;
		floats_half half;

		memcpy(&bits, &number, sizeof(bits));
		half = kind == PLANES_F16 ? floats_f32_to_f16(bits) : floats_f32_to_bf16(bits);
		if (kind == PLANES_F32)
			memcpy((char *)values + i * sizeof(bits), &bits, sizeof(bits));
		else
			memcpy((char *)values + i * sizeof(half), &half, sizeof(half));
	}
}

static void measure_loops(const char *name, enum planes_kind kind, const struct planes_code *code)
{
	uint64_t width = planes_shapes[kind].bytes, step = width * PLANES_CHUNK;
	unsigned char *values = room(VALUES * width), *stored = room(VALUES * width);
	unsigned char *back = room(VALUES * width);
	struct planes_chunk *chunks = room(CHUNKS * sizeof(*chunks));
	double coding[ROUNDS], decoding[ROUNDS];

	fill(kind, values);
	for (int round = 0; round < ROUNDS; round++) {
		double start = thread_seconds(), middle;

		for (uint64_t i = 0; i < CHUNKS; i++)
			code->encode(kind, values + i * step, PLANES_CHUNK, stored + i * step,
				     &chunks[i]);
		middle = thread_seconds();
		for (uint64_t i = 0; i < CHUNKS; i++)
			if (!code->decode(kind, stored + i * step, &chunks[i], PLANES_CHUNK,
					  back + i * step))
				die("a chunk does not come back");
		coding[round] = gb_per_s(VALUES * width, middle - start);
		decoding[round] = gb_per_s(VALUES * width, thread_seconds() - middle);
	}
	if (memcmp(values, back, VALUES * width))
		die("what comes back is not what was coded");
	printf("  %-6s %-8s %8.2f %8.2f\n", name, code->name, median(coding, ROUNDS),
	       median(decoding, ROUNDS));
	free(values);
	free(stored);
	free(back);
	free(chunks);
}

static void all_loops(void)
{
	static const struct {
		const char *name;
		enum planes_kind kind;
	} kinds[] = { { "bf16", PLANES_BF16 }, { "f32", PLANES_F32 }, { "f16", PLANES_F16 } };
	const struct planes_code *codes[PLANES_CODES];
	size_t count = planes_usable(codes);

	printf("loops, GB of numbers by second of CPU time\n  %-6s %-8s %8s %8s\n", "", "", "code",
	       "decode");
	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
		for (size_t k = 0; k < count; k++)
			measure_loops(kinds[i].name, kinds[i].kind, codes[k]);
}

/* --------------------------------------------------------------------------------- the file -- */

static void tell(const char *what, uint64_t bytes, const double *seconds, const double *cpu)
{
	double wall = median(seconds, ROUNDS), used = median(cpu, ROUNDS);

	printf("  %-26s %8.3f %8.3f %8.2f %8.2f\n", what, wall, used, gb_per_s(bytes, wall),
	       gb_per_s(bytes, used));
}

/* Pack `from`, or decode it again to nowhere; `to` is kept where a name is given. */
static void convert(const char *what, const char *from, const char *to, unsigned int threads,
		    bool keep)
{
	struct pen_pack_options options = PEN_PACK_OPTIONS_INIT;
	struct pen_packed packed = PEN_PACKED_INIT;
	double seconds[ROUNDS], cpu[ROUNDS];
	struct pen_error err;

	options.threads = threads;
	for (int round = 0; round < ROUNDS; round++) {
		double start = now(), cpu_start = cpu_now();
		struct pen_object *object = NULL;
		struct pen_pack *pack;

		if (to)
			check(pen_object_open(to, PEN_WRITE, 0, &object, &err), &err);
		check(to ? pen_pack_start(from, object, &options, &pack, &err)
			 : pen_unpack_start(from, NULL, &options, &pack, &err), &err);
		check(pen_pack_wait(pack, &packed, &err), &err);
		seconds[round] = now() - start;
		cpu[round] = cpu_now() - cpu_start;
		if (keep && !round)
			check(pen_object_commit(object, &err), &err);
		pen_object_close(object);
	}
	tell(what, packed.bytes, seconds, cpu);
}

static void load(const char *what, const char *path)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	double seconds[ROUNDS], cpu[ROUNDS];
	const struct pen_tensor *tensors;
	struct pen_placement *placements;
	struct pen_device *host;
	struct pen_model *model;
	struct pen_error err;
	uint64_t total;
	void *memory;
	size_t count;

	check(pen_device_open("host", &host, &err), &err);
	check(pen_model_open_files(&path, 1, &model, &err), &err);
	count = pen_model_tensors(model, &tensors);
	placements = calloc(count + 1, sizeof(placements[0]));
	if (!placements)
		die("there is no memory");
	for (size_t i = 0; i < count; i++)
		placements[i].tensor = &tensors[i];
	check(pen_placement_layout(placements, count, &total, &err), &err);
	check(pen_device_alloc(host, total, &memory, &err), &err);
	memset(memory, 1, total);
	for (size_t i = 0; i < count; i++)
		placements[i].memory = (char *)memory + (uintptr_t)placements[i].memory;
	for (int round = 0; round < ROUNDS; round++) {
		double start = now(), cpu_start = cpu_now();
		struct pen_job *job;

		check(pen_load_start(model, host, placements, count, &options, &job, &err), &err);
		check(pen_job_wait(job, NULL, &err), &err);
		seconds[round] = now() - start;
		cpu[round] = cpu_now() - cpu_start;
	}
	tell(what, total, seconds, cpu);
	check(pen_device_free(host, memory, total, &err), &err);
	pen_model_close(model);
	pen_device_close(host);
	free(placements);
}

int main(int argc, char **argv)
{
	char coded[4096];

	if (argc != 3)
		die("usage: coding_bench FILE.safetensors FOLDER");
	snprintf(coded, sizeof(coded), "%s/coded.safetensors", argv[2]);
	all_loops();
	printf("\nfile, GB of the original by second\n  %-26s %8s %8s %8s %8s\n", "", "seconds",
	       "CPU", "GB/s", "by CPU");
	convert("pack, one thread", argv[1], coded, 1, false);
	convert("pack, all cores", argv[1], coded, 0, true);
	convert("decode to nowhere, one", coded, NULL, 1, false);
	convert("decode to nowhere, all", coded, NULL, 0, false);
	load("load to the host, plain", argv[1]);
	load("load to the host, coded", coded);
	unlink(coded);
	return 0;
}

/* SPDX-License-Identifier: MIT */
/*
 * Coded tensors decoded by a GPU: its kernels, or the cores that do their work, leave the very bits
 * of the twin in base/coding.c and of the original file, whatever the numbers, the chunks and the
 * boxes; damage is named. Runs on a GPU and on the fake one; what needs the fake's settings says
 * so.
 */
#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include "base/coding.h"
#include "fake_gpu.h"
#include "mem/device.h"
#include "penstock.h"
#include "scratch.h"
#include "sys/cuda.h"
#include "sys/fault.h"
#include "test.h"

static struct pen_error err;

#define CHECK_PEN(call)                                                        \
	do {                                                                   \
		if (call) {                                                    \
			char test_text[1024];                                  \
			pen_error_format(&err, test_text, sizeof(test_text));  \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, test_text); \
			exit(1);                                               \
		}                                                              \
	} while (0)

static struct pen_device *open_device(const char *name)
{
	struct pen_device *device;
	const struct cuda_api *cuda = strcmp(name, "host") ? cuda_open(&err) : NULL;
	int count = 0;

	if (strcmp(name, "host") && !cuda)
		SKIP("there is no NVIDIA driver");
	if (cuda && (cuda->cuInit(0) || cuda->cuDeviceGetCount(&count) || !count))
		SKIP("there is no GPU");
	CHECK_PEN(pen_device_open(name, &device, &err));
	CHECK_PEN(pen_device_ready(device, &err));
	return device;
}

static uint32_t chance(void)
{
	static uint64_t seed = 1;

	seed = seed * 6364136223846793005ull + 1442695040888963407ull;
	return (uint32_t)(seed >> 32);
}

/* How numbers are made: as weights are, of few symbols, of many, all alike, any bits. */
enum how { WEIGHTS, FEW, ESCAPES, ALIKE, RANDOM, HOWS };

static uint32_t make_value(enum planes_kind kind, enum how how)
{
	const struct planes_shape *shape = &planes_shapes[kind];
	uint32_t rest = chance(), symbol = 0, most = (1u << shape->symbol) - 1;
	uint32_t zeros = (uint32_t)__builtin_clz(chance() | 1);

	switch (how) {
	case WEIGHTS:
		symbol = most * 3 / 4 - (zeros < most / 2 ? zeros : most / 2);
		break;
	case FEW:
		symbol = chance() % 3;
		break;
	case ESCAPES:
		symbol = chance() % 8 < 5 ? 0 : chance();
		break;
	case ALIKE:
		return 0;
	default:
		return rest;
	}
	return (rest & ~(most << shape->mantissa)) | (symbol & most) << shape->mantissa;
}

static void make_values(enum planes_kind kind, enum how how, unsigned char *to, uint64_t count)
{
	uint32_t size = planes_shapes[kind].bytes;

	for (uint64_t i = 0; i < count; i++) {
		uint32_t value = make_value(kind, how);

		memcpy(to + i * size, &value, size);
	}
}

/* ------------------------------------------------------------------ kernels and their twin -- */

#define VALUES_MOST (245u * PLANES_CHUNK)	/* more than one launch */
#define MEMORY (VALUES_MOST * 4 + 4096)
#define STORED (VALUES_MOST * 4)
#define GUARD 64u

struct bench {
	struct pen_device *device;
	struct device_stream stream;
	struct device_fence fence;
	unsigned char *plain, *stored, *expected, *back;
	unsigned char *memory;		/* the device's */
	struct planes_chunk *table;
	uint64_t *offsets;
};

static void *need(size_t size)
{
	void *memory = NULL;

	CHECK(!posix_memalign(&memory, 4096, size));
	memset(memory, 0, size);
	return memory;
}

static void set_up(struct bench *bench)
{
	size_t chunks = VALUES_MOST / PLANES_CHUNK;
	void *memory;

	memset(bench, 0, sizeof(*bench));
	bench->device = open_device("cuda:0");
	CHECK_PEN(device_enter(bench->device, &err));
	CHECK_PEN(device_stream_open(bench->device, &bench->stream, &err));
	CHECK_PEN(device_fence_open(bench->device, &bench->fence, &err));
	CHECK_PEN(pen_device_alloc(bench->device, MEMORY, &memory, &err));
	bench->memory = memory;
	bench->plain = need(VALUES_MOST * 4 + 4);
	bench->stored = need(STORED);
	bench->expected = need(MEMORY);
	bench->back = need(MEMORY);
	bench->table = need(chunks * sizeof(bench->table[0]));
	bench->offsets = need(chunks * sizeof(bench->offsets[0]));
	CHECK_PEN(device_pin(bench->device, bench->stored, STORED, false, &err));
}

static void tear_down(struct bench *bench)
{
	device_fence_close(bench->device, &bench->fence);
	device_stream_close(bench->device, &bench->stream);
	CHECK_PEN(device_unpin(bench->device, bench->stored, &err));
	CHECK_PEN(pen_device_free(bench->device, bench->memory, MEMORY, &err));
	free(bench->plain);
	free(bench->stored);
	free(bench->expected);
	free(bench->back);
	free(bench->table);
	free(bench->offsets);
	pen_device_close(bench->device);
}

static void encode(struct bench *bench, enum planes_kind kind, enum how how, uint32_t values)
{
	uint32_t size = planes_shapes[kind].bytes;
	uint64_t at = 0;

	make_values(kind, how, bench->plain, values);
	for (uint32_t i = 0; i * PLANES_CHUNK < values; i++) {
		uint32_t left = values - i * PLANES_CHUNK;
		uint32_t count = left < PLANES_CHUNK ? left : PLANES_CHUNK;
		static unsigned char room[PLANES_ROOM];

		planes_encode(kind, bench->plain + (size_t)i * PLANES_CHUNK * size, count, room,
			      &bench->table[i]);
		CHECK(planes_check(kind, count, &bench->table[i]));
		bench->offsets[i] = at;
		memcpy(bench->stored + at, room, bench->table[i].bytes);
		at += bench->table[i].bytes;
	}
}

struct box {
	uint64_t start, length, rows, pitch, gap;
};

/* What a kernel makes of what is stored, beside what its twin makes of it; returns the verdict. */
static unsigned int compare(struct bench *bench, unsigned int number, uint32_t values,
			    struct box box, bool damaged)
{
	const struct coding_kernel *kernel = &coding_kernels[number];
	struct coding coding = {
		.kind = kernel->kind, .form = form_of(kernel->form), .chunks = bench->table,
		.offsets = bench->offsets, .values = values, .start = box.start,
		.length = box.length, .rows = box.rows, .pitch = box.pitch,
	};
	uint64_t size = coding_value_size(&coding), shift = GUARD + (box.gap == 1 ? size : 0);
	struct coding_part part = { .coding = &coding, .stored = bench->stored,
				    .count = (values + PLANES_CHUNK - 1) / PLANES_CHUNK };
	struct decode_launch launch;
	uint64_t used;
	int rc;

	coding.memory_pitch = (box.length + box.gap) * size;
	used = coding_span(&coding) + shift + GUARD;
	CHECK(used <= MEMORY);
	memset(bench->expected, 0xee, used);
	CHECK_PEN(pen_device_put(bench->device, bench->memory, bench->expected, used, &err));
	part.memory = bench->memory + shift;
	CHECK_PEN(device_decode(bench->device, &bench->stream, &part, 7, &bench->fence, &err));
	CHECK_PEN(device_mark(bench->device, &bench->stream, &bench->fence, &err));
	do
		rc = device_poll(bench->device, &bench->fence, &err);
	while (rc == -EAGAIN);
	CHECK_PEN(rc);
	CHECK_PEN(pen_device_get(bench->device, bench->back, bench->memory, used, &err));
	part.memory = bench->expected + shift;
	launch.mark = 7;
	launch.verdict = &(unsigned int){ 0 };
	for (uint64_t done = 0; done < part.count; done += launch.count) {
		coding_launch(&part, done, &launch);
		decode_run(&launch, coding.kind, coding.form);
	}
	for (uint64_t i = 0; i < used && !damaged; i++)
		if (bench->back[i] != bench->expected[i]) {
			fprintf(stderr, "%s: byte %llu of %llu is %02x, not %02x\n", kernel->name,
				(unsigned long long)i, (unsigned long long)used, bench->back[i],
				bench->expected[i]);
			exit(1);
		}
	return device_verdict(&bench->fence);
}

TEST(kernels_leave_the_bits_of_their_twin)
{
	static const uint32_t lengths[] = { 1, 2, 3, 15, 17, 511, 513, 2047, 2050, 16383, 16385,
					    3 * 16384 - 1 };
	static const struct box boxes[] = {
		{ 3, 16000, 1, 16000, 1 }, { 16390, 20000, 1, 20000, 0 }, { 100, 70, 300, 123, 1 },
		{ 5, 64, 9, 4096, 0 }, { 39999, 1, 1, 1, 0 }, { 0, 1, 400, 100, 3 },
		{ 0, 32, 1000, 40, 0 }, { 2048, 2048, 4, 8192, 0 }, { 64, 48, 100, 256, 16 },
		{ 16, 1000, 19, 1999, 0 }, { 700, 100, 30, 520, 12 },
	};
	struct bench bench;

	set_up(&bench);
	for (unsigned int number = 0; number < CODING_KERNELS; number++)
		for (enum how how = 0; how < HOWS; how++) {
			for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
				uint32_t n = lengths[i];

				encode(&bench, coding_kernels[number].kind, how, n);
				CHECK_EQ(compare(&bench, number, n, (struct box){ 0, n, 1, n, 0 },
						 false), 0);
			}
			encode(&bench, coding_kernels[number].kind, how, 40000);
			for (size_t i = 0; i < sizeof(boxes) / sizeof(boxes[0]); i++)
				CHECK_EQ(compare(&bench, number, 40000, boxes[i], false), 0);
		}
	tear_down(&bench);
}

TEST(more_chunks_than_a_launch_takes_are_decoded)
{
	struct bench bench;

	set_up(&bench);
	encode(&bench, PLANES_BF16, WEIGHTS, VALUES_MOST);
	CHECK_EQ(compare(&bench, 0, VALUES_MOST, (struct box){ 0, VALUES_MOST, 1, VALUES_MOST, 0 },
			 false), 0);
	/* The verdict counts from the part's first chunk, not from the launch's. */
	bench.stored[bench.offsets[242] + 20] ^= 1;
	CHECK_EQ(compare(&bench, 0, VALUES_MOST, (struct box){ 0, VALUES_MOST, 1, VALUES_MOST, 0 },
			 true), 7 + 242 + 1);
	tear_down(&bench);
}

/* Whatever the bytes are, nothing beside the memory is written, and they are told from good. */
TEST(damaged_and_hostile_chunks_are_told)
{
	struct bench bench;

	set_up(&bench);
	for (unsigned int number = 0; number < CODING_KERNELS; number++)
		for (int kind = 0; kind < 3; kind++) {
			encode(&bench, coding_kernels[number].kind, kind == 1 ? ESCAPES : WEIGHTS,
			       20000);
			for (uint64_t i = 0; i < bench.offsets[1]; i++)
				bench.stored[i] = kind ? 0xff : (unsigned char)chance();
			CHECK_EQ(compare(&bench, number, 20000,
					 (struct box){ 0, 20000, 1, 20000, 0 }, true), 8);
			for (uint64_t i = 0; i < GUARD; i++)
				CHECK_EQ(bench.back[i], 0xee);
			/* A verdict is for good. */
			device_fence_close(bench.device, &bench.fence);
			CHECK_PEN(device_fence_open(bench.device, &bench.fence, &err));
		}
	tear_down(&bench);
}

/* ------------------------------------------------------------------------------ whole loads -- */

struct made {
	const char *name;
	int dtype;
	enum planes_kind kind;
	enum how how;
	uint64_t shape[3];
	unsigned char *bytes;
};

/* A box that is cut in all dimensions is as many extents as its first has steps. */
static struct made mades[] = {
	{ "bf16", PEN_BF16, PLANES_BF16, WEIGHTS, { 7, 300, 200 }, NULL },
	{ "f32", PEN_F32, PLANES_F32, WEIGHTS, { 5, 60, 1000 }, NULL },
	{ "f16", PEN_F16, PLANES_F16, WEIGHTS, { 3, 100, 1010 }, NULL },
	{ "e4m3", PEN_F8_E4M3, PLANES_E4M3, WEIGHTS, { 3, 1031, 101 }, NULL },
	{ "e5m2", PEN_F8_E5M2, PLANES_E5M2, WEIGHTS, { 3, 1100, 101 }, NULL },
	{ "noise", PEN_BF16, PLANES_BF16, RANDOM, { 2, 400, 50 }, NULL },
	{ "zeros", PEN_BF16, PLANES_BF16, ALIKE, { 2, 400, 50 }, NULL },
	{ "odd", PEN_F32, PLANES_F32, ESCAPES, { 2, 400, 50 }, NULL },
	{ "few", PEN_F16, PLANES_F16, FEW, { 1, 1, 7 }, NULL },
};

#define TENSORS (sizeof(mades) / sizeof(mades[0]))

static uint64_t value_count(const struct made *made)
{
	return made->shape[0] * made->shape[1] * made->shape[2];
}

static uint64_t byte_count(const struct made *made)
{
	return value_count(made) * planes_shapes[made->kind].bytes;
}

/* A packed file of these. */
static struct pen_model *pack_model(const struct made *made, size_t count)
{
	const char *from = in_scratch("plain.safetensors"), *to = in_scratch("packed.safetensors");
	struct pen_save_tensor tensors[TENSORS];
	struct pen_object *object;
	struct pen_model *model;
	struct pen_save *save;
	struct pen_pack *pack;

	for (size_t i = 0; i < count; i++)
		tensors[i] = (struct pen_save_tensor){
			.name = made[i].name, .dtype = made[i].dtype, .rank = 3,
			.shape = made[i].shape, .memory = made[i].bytes,
		};
	CHECK_PEN(pen_save_start(from, tensors, count, NULL, &save, &err));
	CHECK_PEN(pen_save_wait(save, NULL, &err));
	CHECK_PEN(pen_object_open(to, PEN_WRITE, 0, &object, &err));
	CHECK_PEN(pen_pack_start(from, object, NULL, &pack, &err));
	CHECK_PEN(pen_pack_wait(pack, NULL, &err));
	CHECK_PEN(pen_object_commit(object, &err));
	pen_object_close(object);
	CHECK_PEN(pen_model_open(to, &model, &err));
	return model;
}

/* A packed file of all kinds. */
static struct pen_model *make_model(void)
{
	struct pen_model *model;

	for (size_t i = 0; i < TENSORS; i++) {
		mades[i].bytes = need(byte_count(&mades[i]) + 4);
		make_values(mades[i].kind, mades[i].how, mades[i].bytes, value_count(&mades[i]));
	}
	model = pack_model(mades, TENSORS);
	CHECK(pen_model_find(model, "bf16")->coded && !pen_model_find(model, "few")->coded);
	return model;
}

static void free_model(struct pen_model *model)
{
	pen_model_close(model);
	for (size_t i = 0; i < TENSORS; i++)
		free(mades[i].bytes);
}

/* A box of the original, in a form, is at `found`. */
static void check_box(const struct made *made, const uint64_t *start, const uint64_t *stop,
		      const struct form *form, const unsigned char *found)
{
	uint32_t size = planes_shapes[made->kind].bytes;
	uint64_t row = (stop[2] - start[2]) * size, in_memory = form_bytes(form, row);
	unsigned char *expected = need(in_memory + 1);

	for (uint64_t i = start[0]; i < stop[0]; i++)
		for (uint64_t j = start[1]; j < stop[1]; j++) {
			uint64_t first = (i * made->shape[1] + j) * made->shape[2] + start[2];
			const unsigned char *from = made->bytes + first * size;

			if (form)
				form->apply(expected, from, row / size);
			else
				memcpy(expected, from, row);
			if (memcmp(expected, found, in_memory)) {
				fprintf(stderr, "%s: other bits at %llu, %llu\n", made->name,
					(unsigned long long)i, (unsigned long long)j);
				exit(1);
			}
			found += in_memory;
		}
	free(expected);
}

#define BOXES 3

/* Everything once whole and in boxes, in its own form or another, by one job. */
static void load_all(struct pen_device *device, struct pen_model *model, bool formed,
		     struct pen_options options, struct pen_report *report)
{
	struct pen_placement placements[TENSORS * (1 + BOXES)];
	uint64_t start[TENSORS * (1 + BOXES)][3], stop[TENSORS * (1 + BOXES)][3], total;
	uint64_t delivered = 0, bytes;
	size_t count = 0;
	unsigned char *back;
	struct pen_job *job;
	void *memory;

	memset(placements, 0, sizeof(placements));
	for (size_t i = 0; i < TENSORS; i++)
		for (int b = 0; b < 1 + BOXES; b++, count++) {
			const struct made *made = &mades[i];
			int to = made->dtype == PEN_F32 ? PEN_BF16 : PEN_F32;
			int form = formed ? pen_form_find(made->dtype, to) : 0;

			for (int k = 0; k < 3; k++) {
				uint64_t all = made->shape[k], from = chance() % all;

				start[count][k] = b ? from : 0;
				stop[count][k] = b ? from + 1 + chance() % (all - from) : all;
			}
			placements[count].tensor = pen_model_find(model, made->name);
			placements[count].start = start[count];
			placements[count].stop = stop[count];
			placements[count].form = form > 0 ? (uint64_t)form : 0;
			CHECK_PEN(pen_placement_bytes(&placements[count], &bytes, &err));
			delivered += bytes;
		}
	CHECK_PEN(pen_placement_layout(placements, count, &total, &err));
	options.allocate = total;
	options.allocated = &memory;
	CHECK_PEN(pen_load_start(model, device, placements, count, &options, &job, &err));
	CHECK_PEN(pen_job_wait(job, report, &err));
	CHECK(!report || report->delivered_bytes == delivered);
	back = need(total);
	CHECK_PEN(pen_device_get(device, back, memory, total, &err));
	for (size_t i = 0; i < count; i++)
		check_box(&mades[i / (1 + BOXES)], start[i], stop[i], form_of(placements[i].form),
			  back + (uintptr_t)placements[i].memory);
	free(back);
	CHECK_PEN(pen_device_free(device, memory, total, &err));
}

static bool refused(const struct pen_report *report, const char *path, const char *words)
{
	for (uint32_t i = 0; i < report->refused_count; i++)
		if (!strcmp(report->refused[i].path, path))
			return strstr(report->refused[i].reason, words) != NULL;
	return false;
}

static void check_device(const char *name, const int *types, size_t type_count)
{
	struct pen_device *device = open_device(name);
	struct pen_model *model = make_model();

	for (size_t t = 0; t < type_count; t++)
		for (int round = 0; round < 2; round++) {
			struct pen_options options = PEN_OPTIONS_INIT;
			struct pen_report report = PEN_REPORT_INIT;

			options.transfer = types[t];
			load_all(device, model, round % 2, options, &report);
			CHECK(!refused(&report, "kernels", ""));
			CHECK(report.coded_bytes && report.coded_bytes < report.bytes);
			CHECK(!report.device_staging_bytes);
			CHECK_EQ(report.decode_seconds > 0, !strcmp(name, "host"));
			CHECK_EQ(report.core_decoded_bytes,
				 strcmp(name, "host") ? 0 : report.coded_bytes);
		}
	free_model(model);
	pen_device_close(device);
}

TEST(coded_tensors_arrive_on_a_gpu_by_every_way)
{
	static const int types[] = { PEN_AUTO, PEN_CPU_GPU, PEN_CPU_ASYNC_GPU,
				     PEN_CPU_CACHED_GPU };

	check_device("cuda:0", types, 4);
}

/* A case of its own: that a kernel reads what is registered read-only is the driver's word. */
TEST(a_gpu_decodes_out_of_the_page_cache_itself)
{
	static const int types[] = { PEN_MAPPED };
	struct pen_device *device = open_device("cuda:0");
	bool maps = device->maps;

	pen_device_close(device);
	if (!maps)
		SKIP("this driver cannot register read-only memory");
	check_device("cuda:0", types, 1);
}

TEST(coded_tensors_arrive_in_host_memory)
{
	static const int types[] = { PEN_AUTO, PEN_CPU_ONLY };

	check_device("host", types, 2);
}

TEST(small_limits_and_requests_hold_whole_chunks)
{
	struct pen_device *device = open_device("cuda:0");
	struct pen_model *model = make_model();
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_placement placement = { .tensor = pen_model_find(model, "bf16") };
	struct pen_job *job;
	void *memory;

	options.memory_limit = 256 << 10;
	options.lanes = 1;
	load_all(device, model, false, options, NULL);
	options.memory_limit = 0;
	options.request_size = 4096;
	load_all(device, model, true, options, NULL);
	options.request_size = 0;
	options.memory_limit = 64 << 10;
	options.allocate = placement.tensor->bytes;
	options.allocated = &memory;
	CHECK_EQ(pen_load_start(model, device, &placement, 1, &options, &job, &err), -EINVAL);
	CHECK(strstr(err.hint, "256 KiB"));
	free_model(model);
	pen_device_close(device);
}

/* Values at odd addresses are no kernel's work. */
TEST(memory_that_does_not_lie_well_is_filled_by_cores)
{
	struct pen_model *model = make_model();
	const struct made *made = &mades[0];
	struct pen_placement placement = { .tensor = pen_model_find(model, made->name) };
	struct pen_report report = PEN_REPORT_INIT;
	uint64_t size = byte_count(made);
	unsigned char *back = need(size);
	struct pen_device *device;
	struct pen_job *job;
	void *memory;

	/* The core's copies are out of plain memory, which the real driver takes. */
	setenv("FAKE_CUDA_STRICT", "0", 1);
	device = open_device("cuda:0");
	CHECK_PEN(pen_device_alloc(device, size + 1, &memory, &err));
	placement.memory = (char *)memory + 1;
	CHECK_PEN(pen_load_start(model, device, &placement, 1, NULL, &job, &err));
	CHECK_PEN(pen_job_wait(job, &report, &err));
	CHECK(refused(&report, "kernels", "multiple of the size"));
	CHECK_PEN(pen_device_get(device, back, (char *)memory + 1, size, &err));
	CHECK(!memcmp(back, made->bytes, size));
	CHECK_PEN(pen_device_free(device, memory, size + 1, &err));
	free(back);
	free_model(model);
	pen_device_close(device);
}

/* One of them lies where no kernel can store it. */
TEST(the_report_tells_what_cores_decoded_beside_a_gpu)
{
	struct pen_model *model = make_model();
	struct pen_placement placements[] = { { .tensor = pen_model_find(model, "bf16") },
					      { .tensor = pen_model_find(model, "f16") } };
	struct pen_report report = PEN_REPORT_INIT;
	uint64_t size = byte_count(&mades[0]) + byte_count(&mades[2]) + 1;
	struct pen_device *device;
	struct pen_job *job;
	void *memory;

	setenv("FAKE_CUDA_STRICT", "0", 1);
	device = open_device("cuda:0");
	CHECK_PEN(pen_device_alloc(device, size, &memory, &err));
	placements[0].memory = memory;
	placements[1].memory = (char *)memory + byte_count(&mades[0]) + 1;
	CHECK_PEN(pen_load_start(model, device, placements, 2, NULL, &job, &err));
	CHECK_PEN(pen_job_wait(job, &report, &err));
	CHECK_EQ(report.core_decoded_bytes, placements[1].tensor->coded);
	CHECK_EQ(report.coded_bytes, placements[0].tensor->coded + placements[1].tensor->coded);
	CHECK_PEN(pen_device_free(device, memory, size, &err));
	free_model(model);
	pen_device_close(device);
}

static void check_damage(const char *name)
{
	struct pen_device *device = open_device(name);
	struct pen_model *model = make_model();
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_placement placements[TENSORS];
	const struct pen_tensor *tensor = pen_model_find(model, "f32");
	int fd = open(in_scratch("packed.safetensors"), O_RDWR | O_CLOEXEC);
	unsigned char byte;
	struct pen_job *job;
	uint64_t total;
	void *memory;
	int rc;

	memset(placements, 0, sizeof(placements));
	/* In the last of its 19 chunks. */
	CHECK(fd >= 0);
	CHECK_EQ(pread(fd, &byte, 1, (off_t)(tensor->offset + tensor->coded - 2000)), 1);
	byte ^= 8;
	CHECK_EQ(pwrite(fd, &byte, 1, (off_t)(tensor->offset + tensor->coded - 2000)), 1);
	close(fd);
	pen_model_close(model);
	CHECK_PEN(pen_model_open(in_scratch("packed.safetensors"), &model, &err));
	for (size_t i = 0; i < TENSORS; i++)
		placements[i].tensor = pen_model_find(model, mades[i].name);
	CHECK_PEN(pen_placement_layout(placements, TENSORS, &total, &err));
	options.allocate = total;
	options.allocated = &memory;
	rc = pen_load_start(model, device, placements, TENSORS, &options, &job, &err);
	if (!rc)
		rc = pen_job_wait(job, NULL, &err);
	CHECK_EQ(rc, -EBADMSG);
	CHECK(strstr(err.message, "chunk 18 of tensor \"f32\""));
	CHECK(strstr(err.object, "packed.safetensors"));
	free_model(model);
	pen_device_close(device);
}

TEST(a_chunk_that_is_damaged_is_named_by_a_gpu)
{
	check_damage("cuda:0");
}

TEST(a_chunk_that_is_damaged_is_named_by_the_host)
{
	check_damage("host");
}

/* ----------------------------------------------------------------------- a driver that fails -- */

/* A GPU whose fake driver says no to something. What a core does then is copied out of plain
 * memory, which the real driver takes. */
static struct pen_device *open_failing(const char *fail)
{
	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_FAIL", fail, 1);
	setenv("FAKE_CUDA_STRICT", "0", 1);
	return open_device("cuda:0");
}

/* The fake driver says no in one way or another; a core does the work, and the report says why. */
static void without_kernels(const char *fail, const char *words)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_device *device;
	struct pen_model *model;

	device = open_failing(fail);
	model = make_model();
	load_all(device, model, false, options, &report);
	load_all(device, model, true, options, NULL);
	if (!refused(&report, "kernels", words)) {
		fprintf(stderr, "no word of %s\n", words);
		exit(1);
	}
	CHECK(report.decode_seconds > 0);
	CHECK_EQ(report.core_decoded_bytes, report.coded_bytes);
	free_model(model);
	pen_device_close(device);
}

TEST(where_no_kernel_can_be_loaded_a_core_decodes)
{
	without_kernels("cuModuleLoadData:1+=209", "NO_BINARY_FOR_GPU");
}

TEST(where_a_kernel_is_missing_a_core_decodes)
{
	without_kernels("cuModuleGetFunction:9=500", "NOT_FOUND");
}

TEST(where_memory_cannot_be_pinned_a_core_decodes)
{
	without_kernels("cuMemHostRegister_v2:1+=2", "could not be pinned");
}

TEST(what_a_core_decodes_in_is_within_the_memory_promise)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_device *device;
	struct pen_model *model;

	device = open_failing("cuModuleLoadData:1+=209");
	model = make_model();
	options.memory_limit = 256 << 10;
	load_all(device, model, true, options, &report);
	/* A piece, and a chunk of four bytes a value; a second piece would be too much. */
	CHECK_EQ(report.pinned_bytes, (128 << 10) + (64 << 10));
	options.memory_limit = 4 << 20;
	load_all(device, model, true, options, &report);
	CHECK(report.pinned_bytes <= options.memory_limit);
	free_model(model);
	pen_device_close(device);
}

/* What may pass is no reason to do without kernels from then on. */
static void with_kernels_the_second_time(const char *fail)
{
	struct pen_report first = PEN_REPORT_INIT, second = PEN_REPORT_INIT;
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_device *device;
	struct pen_model *model;

	device = open_failing(fail);
	model = make_model();
	load_all(device, model, false, options, &first);
	CHECK(refused(&first, "kernels", "OUT_OF_MEMORY"));
	load_all(device, model, false, options, &second);
	CHECK(!refused(&second, "kernels", "") && second.decode_seconds == 0);
	free_model(model);
	pen_device_close(device);
}

TEST(kernels_that_had_no_memory_are_loaded_by_the_next)
{
	with_kernels_the_second_time("cuModuleLoadData:1=2");
}

TEST(kernels_that_had_no_room_for_their_code_are_loaded_by_the_next)
{
	with_kernels_the_second_time("cuModuleGetFunction:9=2");
}

/* A core would have to look into a mapping, under which the file may be cut short. */
TEST(without_kernels_nothing_is_decoded_out_of_the_page_cache)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_placement placement = { .tensor = NULL };
	struct pen_device *device;
	struct pen_model *model;
	struct pen_job *job;
	void *memory;

	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_FAIL", "cuModuleLoadData:1+=209", 1);
	device = open_device("cuda:0");
	model = make_model();
	placement.tensor = pen_model_find(model, "bf16");
	options.transfer = PEN_MAPPED;
	options.allocate = placement.tensor->bytes;
	options.allocated = &memory;
	CHECK_PEN(pen_load_start(model, device, &placement, 1, &options, &job, &err));
	CHECK_EQ(pen_job_wait(job, NULL, &err), -ENOTSUP);
	CHECK(strstr(err.message, "NO_BINARY"));
	free_model(model);
	pen_device_close(device);
}

/* Also with a code that elsewhere means that a core can do it: others are under way. */
static void launch_fails(const char *fail)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_placement placement = { .tensor = NULL };
	struct pen_device *device;
	struct pen_model *model;
	struct pen_job *job;
	void *memory;

	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_FAIL", fail, 1);
	device = open_device("cuda:0");
	model = make_model();
	placement.tensor = pen_model_find(model, "bf16");
	options.allocate = placement.tensor->bytes;
	options.allocated = &memory;
	CHECK_PEN(pen_load_start(model, device, &placement, 1, &options, &job, &err));
	CHECK_EQ(pen_job_wait(job, NULL, &err), -EIO);
	CHECK_TEXT(err.operation, "start a kernel on");
	free_model(model);
	pen_device_close(device);
}

TEST(a_kernel_that_cannot_be_started_ends_the_job_with_words)
{
	launch_fails("cuLaunchKernel:1=719");
}

TEST(a_kernel_that_the_driver_does_not_support_ends_the_job_with_words)
{
	launch_fails("cuLaunchKernel:1=801");
}

/* ---------------------------------------------------------------------------- with few cores -- */

/* Large enough for the mapped path. */
static struct made large = { "large", PEN_BF16, PLANES_BF16, WEIGHTS, { 64, 1024, 900 }, NULL };

static struct pen_model *make_large(void)
{
	uint64_t size = byte_count(&large), part = 1 << 20;

	large.bytes = need(size);
	make_values(large.kind, large.how, large.bytes, part / 2);
	for (uint64_t at = part; at < size; at += part)
		memcpy(large.bytes + at, large.bytes, size - at < part ? size - at : part);
	return pack_model(&large, 1);
}

static void have_few_cores(void)
{
	cpu_set_t all, few;
	int count = 0;

	CHECK_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
	CPU_ZERO(&few);
	for (int i = 0; i < CPU_SETSIZE && count < 2; i++)
		if (CPU_ISSET(i, &all)) {
			CPU_SET(i, &few);
			count++;
		}
	CHECK_EQ(sched_setaffinity(0, sizeof(few), &few), 0);
}

/* Load it by auto, `shift` bytes behind where memory begins. */
static void load_large(struct pen_device *device, struct pen_model *model, uint64_t shift,
		       struct pen_report *report)
{
	struct pen_placement placement = { .tensor = pen_model_find(model, large.name) };
	uint64_t size = byte_count(&large);
	unsigned char *back = need(size);
	struct pen_job *job;
	void *memory;

	CHECK_PEN(pen_device_alloc(device, size + shift, &memory, &err));
	placement.memory = (char *)memory + shift;
	CHECK_PEN(pen_load_start(model, device, &placement, 1, NULL, &job, &err));
	CHECK_PEN(pen_job_wait(job, report, &err));
	CHECK_PEN(pen_device_get(device, back, placement.memory, size, &err));
	CHECK(!memcmp(back, large.bytes, size));
	CHECK_PEN(pen_device_free(device, memory, size + shift, &err));
	free(back);
}

static uint64_t bytes_by(const struct pen_report *report, const char *path)
{
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < report->path_count; i++)
		bytes += strcmp(report->paths[i].path, path) ? 0 : report->paths[i].bytes;
	return bytes;
}

TEST(with_few_cores_auto_lets_a_gpu_decode_out_of_the_page_cache)
{
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_device *device = open_device("cuda:0");
	struct pen_model *model;

	if (!device->maps)
		SKIP("this driver cannot register read-only memory");
	have_few_cores();
	model = make_large();
	load_large(device, model, 0, &report);
	CHECK_EQ(bytes_by(&report, "mapped"), report.bytes);
	CHECK(!refused(&report, "mapped", "") && !refused(&report, "kernels", ""));
	pen_model_close(model);
	free(large.bytes);
	pen_device_close(device);
}

TEST(with_few_cores_and_no_kernels_auto_steps_down_and_does_not_try_again)
{
	struct pen_report first = PEN_REPORT_INIT, second = PEN_REPORT_INIT;
	struct pen_device *device;
	struct pen_model *model;

	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_FAIL", "cuModuleLoadData:1+=209", 1);
	/* The core's copies are out of plain memory, which the real driver takes. */
	setenv("FAKE_CUDA_STRICT", "0", 1);
	have_few_cores();
	device = open_device("cuda:0");
	model = make_large();
	load_large(device, model, 0, &first);
	CHECK_EQ(bytes_by(&first, "cached"), first.bytes);
	CHECK(refused(&first, "mapped", "NO_BINARY_FOR_GPU"));
	CHECK(refused(&first, "kernels", "NO_BINARY_FOR_GPU"));
	load_large(device, model, 0, &second);
	CHECK_EQ(bytes_by(&second, "cached"), second.bytes);
	CHECK(refused(&second, "mapped", "starts no kernels"));
	pen_model_close(model);
	free(large.bytes);
	pen_device_close(device);
}

TEST(what_no_kernel_can_store_leaves_the_mapped_path_and_is_right)
{
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_device *device;
	struct pen_model *model;

	setenv("FAKE_CUDA_STRICT", "0", 1);
	device = open_device("cuda:0");
	if (!device->maps)
		SKIP("this driver cannot register read-only memory");
	have_few_cores();
	model = make_large();
	load_large(device, model, 1, &report);
	CHECK(refused(&report, "mapped", "multiple of the size"));
	CHECK_EQ(bytes_by(&report, "cached"), report.bytes);
	pen_model_close(model);
	free(large.bytes);
	pen_device_close(device);
}

/* ------------------------------------------------------------------------- a call that fails -- */

static atomic_uint calls;
static unsigned int failing;

static int fail_kth(const char *name)
{
	(void)name;
	return ++calls == failing ? ENOMEM : 0;
}

/* Returns whether there was a k-th call; every run ends right, or with words. */
static bool with_kth(unsigned int k, struct pen_model *model)
{
	struct pen_placement placements[2] = { { .tensor = pen_model_find(model, "bf16") },
					       { .tensor = pen_model_find(model, "odd") } };
	static unsigned char back[4 << 20];
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_device *device = NULL;
	struct pen_job *job = NULL;
	void *memory = NULL;
	uint64_t total;
	int rc;

	CHECK_PEN(pen_placement_layout(placements, 2, &total, &err));
	CHECK(total <= sizeof(back));
	options.allocate = total;
	options.allocated = &memory;
	options.lanes = 1;
	err.code = 0;
	calls = 0;
	failing = k;
	sys_fault_hook = fail_kth;
	rc = pen_device_open("cuda:0", &device, &err);
	if (!rc)
		rc = pen_load_start(model, device, placements, 2, &options, &job, &err);
	if (!rc)
		rc = pen_job_wait(job, NULL, &err);
	/* The thread that starts the device must not be asking the hook meanwhile. */
	if (device)
		pen_device_ready(device, NULL);
	sys_fault_hook = NULL;
	CHECK(!rc || (err.code == rc && err.message[0]));
	if (!rc) {
		CHECK_PEN(pen_device_get(device, back, memory, total, &err));
		CHECK(!memcmp(back, mades[0].bytes, byte_count(&mades[0])));
		CHECK(!memcmp(back + (uintptr_t)placements[1].memory, mades[7].bytes,
			      byte_count(&mades[7])));
		CHECK_PEN(pen_device_free(device, memory, total, &err));
	}
	pen_device_close(device);
	return calls >= k;
}

TEST(whatever_call_fails_is_told_and_no_wrong_byte_is_left_on_a_gpu)
{
	struct pen_model *model;
	unsigned int k = 1;

	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_STRICT", "0", 1);
	model = make_model();
	while (with_kth(k, model))
		k++;
	CHECK(k > 50);
	free_model(model);
}

TEST_MAIN

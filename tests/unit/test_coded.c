/* SPDX-License-Identifier: MIT */
/*
 * Packed files through the library: packed and unpacked to the byte, saved out of memory as packing
 * would write them, loaded whole and by boxes to where the caller or the job has memory; and what
 * happens when the k-th call out of the program fails on the way.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include "fake_gpu.h"
#include "penstock.h"
#include "scratch.h"
#include "sys/fault.h"

#define ROWS 70u
#define COLUMNS 30u
#define DEPTH 40u
#define VALUES (ROWS * COLUMNS * DEPTH)	/* more than five chunks */

static uint16_t weights[VALUES];
static float plain[1000];

static void make_weights(void)
{
	uint64_t seed = 7;

	for (uint32_t i = 0; i < VALUES; i++) {
		uint32_t chance;

		seed = seed * 6364136223846793005ull + 1442695040888963407ull;
		chance = (uint32_t)(seed >> 32);
		weights[i] = (uint16_t)((chance & 0x807f) |
					(124u - (uint32_t)__builtin_clz(chance | 1)) << 7);
	}
	for (uint32_t i = 0; i < 1000; i++)
		plain[i] = (float)i;
}

/* Save a tensor that can be coded, and one that will not be, from wherever its memory is. */
static int save(const char *path, struct pen_device *device, void *memory,
		const struct pen_save_options *options, struct pen_error *err)
{
	static const uint64_t shape[] = { ROWS, COLUMNS, DEPTH }, few[] = { 1000 };
	struct pen_save_tensor tensors[] = {
		{ .name = "weights", .dtype = PEN_BF16, .rank = 3, .shape = shape,
		  .memory = memory, .device = device },
		{ .name = "plain", .dtype = PEN_F32, .rank = 1, .shape = few, .memory = plain },
	};
	struct pen_save *save;
	int rc = pen_save_start(path, tensors, 2, options, &save, err);

	return rc ? rc : pen_save_wait(save, NULL, err);
}

static const char *original(void)
{
	const char *path = in_scratch("original.safetensors");
	struct pen_error err;

	make_weights();
	CHECK(!save(path, NULL, weights, NULL, &err));
	return path;
}

enum way { PACK, UNPACK };

/* All of it, commit included. */
static int convert(enum way way, const char *from, const char *to, struct pen_packed *packed,
		   struct pen_error *err)
{
	struct pen_pack_options options = PEN_PACK_OPTIONS_INIT;
	struct pen_object *object;
	struct pen_pack *pack;
	int rc = pen_object_open(to, PEN_WRITE, 0, &object, err);

	if (rc)
		return rc;
	options.verify = 1;
	options.threads = 2;
	rc = way == PACK ? pen_pack_start(from, object, &options, &pack, err)
			 : pen_unpack_start(from, object, &options, &pack, err);
	if (!rc) {
		struct pen_progress progress;

		pen_pack_poll(pack, &progress);
		CHECK(progress.bytes <= progress.total);
		CHECK(pen_pack_wait_for(pack, 60) == 0);
		rc = pen_pack_wait(pack, packed, err);
	}
	if (!rc)
		rc = pen_object_commit(object, err);
	pen_object_close(object);
	return rc;
}

static size_t read_file(const char *path, unsigned char *bytes, size_t room)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? 0 : read(fd, bytes, room);

	if (fd >= 0)
		close(fd);
	return n < 0 ? 0 : (size_t)n;
}

static bool same_file(const char *left, const char *right)
{
	static unsigned char a[1 << 20], b[1 << 20];
	size_t size = read_file(left, a, sizeof(a));

	return size && size == read_file(right, b, sizeof(b)) && !memcmp(a, b, size);
}

static const char *packed_file(void)
{
	const char *from = original(), *to = in_scratch("packed.safetensors");
	struct pen_packed packed = PEN_PACKED_INIT;
	struct pen_error err;

	CHECK(!convert(PACK, from, to, &packed, &err));
	CHECK(packed.coded && packed.stored < packed.bytes);
	CHECK(packed.kinds[PEN_BF16].tensors == 1 && packed.kinds[PEN_F32].tensors == 1);
	CHECK(packed.kinds[PEN_BF16].bytes == sizeof(weights));
	CHECK(packed.kinds[PEN_BF16].stored * 10 < sizeof(weights) * 7);
	CHECK(packed.kinds[PEN_F32].stored == packed.kinds[PEN_F32].bytes);
	return to;
}

TEST(a_packed_file_comes_back_to_the_byte)
{
	const char *packed = packed_file(), *back = in_scratch("back.safetensors");
	struct pen_packed report = PEN_PACKED_INIT;
	struct pen_error err;

	CHECK(!convert(UNPACK, packed, back, &report, &err));
	CHECK(report.coded && same_file(back, in_scratch("original.safetensors")));
	CHECK(convert(PACK, packed, back, NULL, &err) == -EINVAL && err.hint[0]);
}

TEST(a_coded_save_is_what_packing_the_plain_one_gives)
{
	const char *packed = packed_file(), *saved = in_scratch("saved.safetensors");
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;
	struct pen_options transfer = PEN_OPTIONS_INIT;
	struct pen_error err;

	options.coded = 1;
	CHECK(!save(saved, NULL, weights, &options, &err));
	CHECK(same_file(saved, packed));
	/* Memory for less than one piece, and a way that no coded byte takes. */
	options.transfer = &transfer;
	transfer.memory_limit = 1 << 20;
	CHECK(save(saved, NULL, weights, &options, &err) == -EINVAL && err.hint[0]);
	transfer.memory_limit = 0;
	transfer.transfer = PEN_GPU_DIRECT;
	CHECK(save(saved, NULL, weights, &options, &err) == -EINVAL && err.hint[0]);
	CHECK(same_file(saved, packed));
}

TEST(a_coded_save_takes_tensors_out_of_a_gpu)
{
	const char *packed = packed_file(), *saved = in_scratch("saved.safetensors");
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;
	struct pen_options transfer = PEN_OPTIONS_INIT;
	struct pen_device *gpu;
	struct pen_error err;
	void *memory;
	int rc;

	CHECK(!pen_device_open("cuda:0", &gpu, &err));
	rc = pen_device_alloc(gpu, sizeof(weights), &memory, &err);
	if (rc) {
		pen_device_close(gpu);
		SKIP("there is no GPU, not even a fake one");
	}
	CHECK(!pen_device_put(gpu, memory, weights, sizeof(weights), &err));
	options.coded = 1;
	options.transfer = &transfer;
	/* The legacy stream: what it holds comes first. */
	transfer.stream = (void *)1;
	CHECK(!save(saved, gpu, memory, &options, &err));
	CHECK(same_file(saved, packed));
	CHECK(!pen_device_free(gpu, memory, sizeof(weights), &err));
	pen_device_close(gpu);
}

TEST(a_coded_save_that_waits_for_a_stream_can_be_cancelled)
{
	static const uint64_t shape[] = { VALUES };
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;
	struct pen_options transfer = PEN_OPTIONS_INIT;
	struct pen_save_tensor tensor = { .name = "weights", .dtype = PEN_BF16, .rank = 1,
					  .shape = shape };
	struct pen_device *gpu;
	struct pen_save *save;
	struct pen_error err;
	void *memory;

	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_FAIL", "cuEventQuery:*=600", 1);	/* not ready, whatever is asked */
	CHECK(!pen_device_open("cuda:0", &gpu, &err));
	CHECK(!pen_device_alloc(gpu, sizeof(weights), &memory, &err));
	tensor.device = gpu;
	tensor.memory = memory;
	options.coded = 1;
	options.transfer = &transfer;
	transfer.stream = PEN_STREAM_LEGACY;
	CHECK(!pen_save_start(in_scratch("saved"), &tensor, 1, &options, &save, &err));
	CHECK(pen_save_wait_for(save, 0.05) == -ETIMEDOUT);
	pen_save_cancel(save);
	CHECK(pen_save_wait(save, NULL, &err) == -ECANCELED && err.code == -ECANCELED);
	CHECK(access(in_scratch("saved"), F_OK));
	CHECK(!pen_device_free(gpu, memory, sizeof(weights), &err));
	pen_device_close(gpu);
}

TEST(what_is_packed_is_verified_without_writing)
{
	const char *packed = packed_file();
	struct pen_packed report = PEN_PACKED_INIT;
	struct pen_error err;
	struct pen_pack *pack;

	CHECK(!pen_unpack_start(packed, NULL, NULL, &pack, &err));
	CHECK(!pen_pack_wait(pack, &report, &err));
	CHECK(report.coded && report.stored < report.bytes);
	CHECK(!pen_unpack_start(in_scratch("original.safetensors"), NULL, NULL, &pack, &err));
	CHECK(!pen_pack_wait(pack, &report, &err) && !report.coded);
	CHECK(pen_pack_start(in_scratch("original.safetensors"), NULL, NULL, &pack, &err) ==
	      -EINVAL);
}

TEST(what_is_cancelled_says_so)
{
	const char *from = original();
	struct pen_object *object;
	struct pen_pack *pack;
	struct pen_error err;
	int rc;

	CHECK(!pen_object_open(in_scratch("packed"), PEN_WRITE, 0, &object, &err));
	CHECK(!pen_pack_start(from, object, NULL, &pack, &err));
	pen_pack_cancel(pack);
	rc = pen_pack_wait(pack, NULL, &err);
	/* It may have been through already. */
	CHECK(!rc || (rc == -ECANCELED && err.message[0]));
	pen_object_close(object);
}

/* --------------------------------------------------------------------------------- loading -- */

static uint32_t random_below(uint32_t limit)
{
	static uint64_t seed = 3;

	seed = seed * 6364136223846793005ull + 1442695040888963407ull;
	return (uint32_t)(seed >> 33) % limit;
}

static void check_box(const uint16_t *found, const uint64_t *start, const uint64_t *stop)
{
	for (uint64_t i = start[0]; i < stop[0]; i++)
		for (uint64_t j = start[1]; j < stop[1]; j++)
			for (uint64_t k = start[2]; k < stop[2]; k++)
				CHECK(*found++ == weights[(i * COLUMNS + j) * DEPTH + k]);
}

/* Load to memory of the caller's, or of the job's. */
static int load(struct pen_model *model, struct pen_placement *placements, size_t count,
		bool allocates, void **memory, uint64_t *total, struct pen_error *err)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_device *host;
	struct pen_job *job;
	int rc = pen_device_open("host", &host, err);

	if (rc)
		return rc;
	rc = pen_placement_layout(placements, count, total, err);
	*memory = NULL;
	if (!rc && allocates) {
		options.allocate = *total;
		options.allocated = memory;
	} else if (!rc) {
		rc = pen_device_alloc(host, *total, memory, err);
		for (size_t i = 0; i < count; i++)
			placements[i].memory = (char *)*memory + (uintptr_t)placements[i].memory;
	}
	if (!rc)
		rc = pen_load_start(model, host, placements, count, &options, &job, err);
	if (!rc)
		rc = pen_job_wait(job, NULL, err);
	if (rc && *memory && !allocates)
		pen_device_free(host, *memory, *total, NULL);
	if (!rc && !allocates)
		for (size_t i = 0; i < count; i++)
			placements[i].memory = (void *)((uintptr_t)placements[i].memory -
							(uintptr_t)*memory);
	pen_device_close(host);
	return rc;
}

static void release(void *memory, uint64_t total)
{
	struct pen_device *host;
	struct pen_error err;

	CHECK(!pen_device_open("host", &host, &err));
	CHECK(!pen_device_free(host, memory, total, &err));
	pen_device_close(host);
}

#define BOXES 8

static void load_boxes(struct pen_model *model, bool allocates)
{
	const struct pen_tensor *tensor = pen_model_find(model, "weights");
	struct pen_placement placements[BOXES + 2] = { { .tensor = tensor } };
	uint64_t start[BOXES][3], stop[BOXES][3], total;
	static const uint64_t all[] = { ROWS, COLUMNS, DEPTH }, none[3];
	struct pen_error err;
	void *memory;

	for (int i = 0; i < BOXES; i++) {
		for (int k = 0; k < 3; k++) {
			start[i][k] = random_below((uint32_t)all[k]);
			stop[i][k] = start[i][k] +
				     random_below((uint32_t)(all[k] - start[i][k] + 1));
		}
		placements[i + 1] = (struct pen_placement){ .tensor = tensor, .start = start[i],
							    .stop = stop[i] };
	}
	placements[BOXES + 1].tensor = pen_model_find(model, "plain");
	CHECK(!load(model, placements, BOXES + 2, allocates, &memory, &total, &err));
	check_box((const uint16_t *)memory, none, all);
	for (int i = 0; i < BOXES; i++)
		check_box((const uint16_t *)((char *)memory +
					     (uintptr_t)placements[i + 1].memory),
			  start[i], stop[i]);
	CHECK(!memcmp((char *)memory + (uintptr_t)placements[BOXES + 1].memory, plain,
		      sizeof(plain)));
	release(memory, total);
}

TEST(coded_tensors_are_loaded_whole_and_by_boxes)
{
	const char *path = packed_file();
	struct pen_model *model;
	struct pen_error err;

	CHECK(!pen_model_open(path, &model, &err));
	CHECK(pen_model_find(model, "weights")->coded);
	CHECK(pen_model_find(model, "weights")->dtype == PEN_BF16);
	CHECK(!pen_model_find(model, "__penstock__"));
	for (int i = 0; i < 40; i++)
		load_boxes(model, i % 2);
	pen_model_close(model);
}

/* Where the offsets of an entry of the file begin; quotes of the original header are escaped. */
static char *offsets_of(char *header, const char *key)
{
	char *entry = strstr(header, key);

	CHECK(entry != NULL);
	entry = strstr(entry, "\"data_offsets\":[");
	CHECK(entry != NULL);
	return entry + strlen("\"data_offsets\":[");
}

/* Another writer may put an empty tensor where a coded one begins that was before it. */
TEST(a_coded_tensor_behind_an_empty_one_is_found)
{
	static const uint64_t shape[] = { VALUES }, none[] = { 0 }, few[] = { 1000 };
	struct pen_save_tensor tensors[] = {
		{ .name = "weights", .dtype = PEN_BF16, .rank = 1, .shape = shape,
		  .memory = weights },
		{ .name = "xempty", .dtype = PEN_BF16, .rank = 1, .shape = none },
		{ .name = "yplain", .dtype = PEN_F32, .rank = 1, .shape = few, .memory = plain },
	};
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;
	struct pen_placement placement = { .tensor = NULL };
	const char *path = in_scratch("empty.safetensors");
	static unsigned char bytes[1 << 20];
	struct pen_model *model;
	struct pen_save *saved;
	struct pen_error err;
	size_t size, length;
	char *begin, *entry;
	uint64_t total;
	void *memory;
	int fd, length_of;

	make_weights();
	options.coded = 1;
	CHECK(!pen_save_start(path, tensors, 3, &options, &saved, &err));
	CHECK(!pen_save_wait(saved, NULL, &err));
	size = read_file(path, bytes, sizeof(bytes) - 1);
	length = (size_t)*(uint64_t *)bytes;
	CHECK(size > length + 8);
	bytes[8 + length - 1] = 0;
	begin = offsets_of((char *)bytes + 8, "\"weights\":");
	entry = offsets_of((char *)bytes + 8, "\"xempty\":");
	length_of = (int)strcspn(begin, ",");
	CHECK((int)strcspn(entry, "]") > 2 * length_of);
	memset(entry, ' ', strcspn(entry, "]"));
	memcpy(entry, begin, (size_t)length_of);
	entry[length_of] = ',';
	memcpy(entry + length_of + 1, begin, (size_t)length_of);
	bytes[8 + length - 1] = ' ';
	fd = open(path, O_WRONLY | O_CLOEXEC);
	CHECK(fd >= 0 && pwrite(fd, bytes + 8, length - 1, 8) == (ssize_t)length - 1);
	close(fd);
	CHECK(!pen_model_open(path, &model, &err));
	placement.tensor = pen_model_find(model, "weights");
	CHECK(placement.tensor->coded &&
	      pen_model_find(model, "xempty")->offset == placement.tensor->offset);
	CHECK(!load(model, &placement, 1, true, &memory, &total, &err));
	CHECK(!memcmp(memory, weights, sizeof(weights)));
	release(memory, total);
	pen_model_close(model);
}

TEST(a_tensor_that_was_made_up_is_refused)
{
	struct pen_tensor tensor;
	struct pen_placement placement = { .tensor = &tensor };
	struct pen_model *model;
	struct pen_error err;
	uint64_t total;
	void *memory;

	CHECK(!pen_model_open(packed_file(), &model, &err));
	tensor = *pen_model_find(model, "weights");
	tensor.coded -= 16;
	CHECK(load(model, &placement, 1, true, &memory, &total, &err) == -EINVAL);
	tensor = *pen_model_find(model, "plain");
	tensor.coded = tensor.bytes;
	CHECK(load(model, &placement, 1, true, &memory, &total, &err) == -EINVAL);
	pen_model_close(model);
}

TEST(a_shape_that_was_made_up_is_refused_before_the_table_of_chunks_is_left)
{
	static const uint64_t shape[] = { 1ull << 40 }, start[] = { (1ull << 40) - 1 };
	struct pen_tensor tensor;
	struct pen_placement placement = { .tensor = &tensor, .start = start, .stop = shape };
	struct pen_model *model;
	struct pen_error err;
	uint64_t total;
	void *memory;

	CHECK(!pen_model_open(packed_file(), &model, &err));
	tensor = *pen_model_find(model, "weights");
	tensor.rank = 1;
	tensor.shape = shape;
	CHECK(load(model, &placement, 1, true, &memory, &total, &err) == -EINVAL);
	CHECK(strstr(err.message, "behind the values") && err.hint[0]);
	pen_model_close(model);
}

TEST(a_damaged_chunk_fails_the_load_and_is_named)
{
	const char *path = packed_file();
	struct pen_placement placement = { .tensor = NULL };
	struct pen_model *model;
	struct pen_error err;
	unsigned char byte;
	uint64_t total;
	void *memory;
	int fd = open(path, O_RDWR | O_CLOEXEC);

	CHECK(fd >= 0 && !pen_model_open(path, &model, &err));
	placement.tensor = pen_model_find(model, "weights");
	CHECK(pread(fd, &byte, 1, (off_t)placement.tensor->offset + 100) == 1);
	byte ^= 8;
	CHECK(pwrite(fd, &byte, 1, (off_t)placement.tensor->offset + 100) == 1);
	close(fd);
	pen_model_close(model);
	CHECK(!pen_model_open(path, &model, &err));
	placement.tensor = pen_model_find(model, "weights");
	CHECK(load(model, &placement, 1, true, &memory, &total, &err) == -EBADMSG);
	CHECK(strstr(err.message, "chunk 0 of tensor \"weights\""));
	pen_model_close(model);
}

#define MANY (70u * 16384u + 5u)	/* values of more than two parts */

/* Load a box of a tensor of this shape, and compare it; returns how often what is stored of the
 * tensor was decoded. */
static double decoded_for(const uint64_t *shape, const uint64_t *start, const uint64_t *stop)
{
	static uint16_t values[MANY], found[MANY];
	struct pen_save_options coded = PEN_SAVE_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_save_tensor tensor = { .name = "w", .dtype = PEN_BF16, .rank = 3,
					  .shape = shape, .memory = values };
	struct pen_placement placement = { .memory = found, .start = start, .stop = stop };
	const char *path = in_scratch("box.safetensors");
	const uint16_t *next = found;
	struct pen_device *host;
	struct pen_model *model;
	struct pen_save *saved;
	struct pen_error err;
	struct pen_job *job;
	double times;

	make_weights();
	for (uint32_t i = 0; i < MANY; i++)
		values[i] = weights[i % VALUES];
	CHECK(shape[0] * shape[1] * shape[2] <= MANY);
	coded.coded = 1;
	CHECK(!pen_save_start(path, &tensor, 1, &coded, &saved, &err));
	CHECK(!pen_save_wait(saved, NULL, &err));
	CHECK(!pen_model_open(path, &model, &err) && !pen_device_open("host", &host, &err));
	placement.tensor = pen_model_find(model, "w");
	CHECK(!pen_load_start(model, host, &placement, 1, NULL, &job, &err));
	CHECK(!pen_job_wait(job, &report, &err));
	for (uint64_t i = start[0]; i < stop[0]; i++)
		for (uint64_t j = start[1]; j < stop[1]; j++)
			for (uint64_t k = start[2]; k < stop[2]; k++)
				CHECK(*next++ == values[(i * shape[1] + j) * shape[2] + k]);
	times = (double)report.coded_bytes / (double)placement.tensor->coded;
	pen_model_close(model);
	pen_device_close(host);
	return times;
}

/* With the loop of most steps as rows, each of the others' steps would decode all of the tensor. */
TEST(a_box_cut_in_two_dimensions_decodes_a_chunk_few_times)
{
	static const uint64_t shape[] = { 398, 90, 32 }, start[] = { 0, 0, 0 };
	static const uint64_t stop[] = { 398, 80, 16 }, few[] = { 398, 2, 16 };

	CHECK(decoded_for(shape, start, stop) < 10);
	/* A launch for each of 398 steps would take longer than to decode it twice. */
	CHECK(decoded_for(shape, start, few) < 3);
}

/* As those of a rank are, in a stack of matrices. */
TEST(chunks_between_long_rows_are_not_decoded)
{
	static const uint64_t shape[] = { 2, 560, 1024 }, start[] = { 0, 0, 0 };
	static const uint64_t stop[] = { 2, 100, 1024 };

	CHECK(decoded_for(shape, start, stop) < 0.25);
}

/* Lanes decode parts of it; the caller knows of one tensor. */
TEST(a_tensor_that_many_lanes_decode_is_told_of_once_when_all_of_it_is_there)
{
	static uint16_t values[MANY], found[2][MANY];
	struct pen_save_options coded = PEN_SAVE_OPTIONS_INIT;
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_save_tensor tensor = { .name = "w", .dtype = PEN_BF16, .rank = 1,
					  .shape = (uint64_t[]){ MANY }, .memory = values };
	const char *path = in_scratch("many.safetensors");
	struct pen_placement placements[2] = { { .memory = found[0] }, { .memory = found[1] } };
	bool told[3] = { false, false, false };
	struct pen_device *host;
	struct pen_model *model;
	struct pen_save *saved;
	struct pen_error err;
	struct pen_job *job;
	uint64_t group;

	make_weights();
	for (uint32_t i = 0; i < MANY; i++)
		values[i] = weights[i % VALUES];
	coded.coded = 1;
	CHECK(!pen_save_start(path, &tensor, 1, &coded, &saved, &err));
	CHECK(!pen_save_wait(saved, NULL, &err));
	CHECK(!pen_model_open(path, &model, &err) && !pen_device_open("host", &host, &err));
	placements[0].tensor = placements[1].tensor = pen_model_find(model, "w");
	options.groups = 1;
	CHECK(pen_load_start(model, host, placements, 2, &options, &job, &err) == -EINVAL);
	/* One more than there are placements: it has no bytes, and is complete. */
	options.groups = 3;
	CHECK(!pen_load_start(model, host, placements, 2, &options, &job, &err));
	while (pen_job_landed(job, &group, 1, 60)) {
		CHECK(group < 3 && !told[group]);
		told[group] = true;
		CHECK(group == 2 || !memcmp(found[group], values, sizeof(values)));
	}
	CHECK(told[0] && told[1] && told[2]);
	CHECK(!pen_job_wait(job, NULL, &err));
	pen_model_close(model);
	pen_device_close(host);
}

static atomic_uint reads;
static pthread_t reader;

static int count_reads(const char *name)
{
	if (!strcmp(name, "pread") && pthread_equal(pthread_self(), reader))
		reads++;
	return 0;
}

#define LAYERS 20u

/* The caller waits for it before anything else is read. */
TEST(the_chunks_of_neighbours_are_read_at_once)
{
	static uint16_t found[LAYERS][5000];
	static const uint64_t shape[] = { 5000 };
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;
	struct pen_save_tensor tensors[LAYERS];
	struct pen_placement placements[LAYERS];
	const char *path = in_scratch("layers.safetensors");
	char names[LAYERS][16];
	struct pen_device *host;
	struct pen_model *model;
	struct pen_save *saved;
	struct pen_error err;
	struct pen_job *job;

	make_weights();
	memset(placements, 0, sizeof(placements));
	for (unsigned int i = 0; i < LAYERS; i++) {
		snprintf(names[i], sizeof(names[i]), "layer.%u", i);
		tensors[i] = (struct pen_save_tensor){ .name = names[i], .dtype = PEN_BF16,
						       .rank = 1, .shape = shape,
						       .memory = weights + i * 100 };
	}
	options.coded = 1;
	CHECK(!pen_save_start(path, tensors, LAYERS, &options, &saved, &err));
	CHECK(!pen_save_wait(saved, NULL, &err));
	CHECK(!pen_model_open(path, &model, &err) && !pen_device_open("host", &host, &err));
	for (unsigned int i = 0; i < LAYERS; i++) {
		placements[i].tensor = pen_model_find(model, names[i]);
		placements[i].memory = found[i];
		CHECK(placements[i].tensor->coded);
	}
	reader = pthread_self();
	sys_fault_hook = count_reads;
	CHECK(!pen_load_start(model, host, placements, LAYERS, NULL, &job, &err));
	CHECK(!pen_job_wait(job, NULL, &err));
	sys_fault_hook = NULL;
	CHECK(reads == 1);
	for (unsigned int i = 0; i < LAYERS; i++)
		CHECK(!memcmp(found[i], weights + i * 100, sizeof(found[i])));
	/* One that nobody wants lies between these. */
	memset(found, 0, sizeof(found));
	placements[7].tensor = placements[8].tensor;
	CHECK(!pen_load_start(model, host, placements, LAYERS, NULL, &job, &err));
	CHECK(!pen_job_wait(job, NULL, &err));
	for (unsigned int i = 0; i < LAYERS; i++)
		CHECK(!memcmp(found[i], weights + (i == 7 ? 8 : i) * 100, sizeof(found[i])));
	pen_model_close(model);
	pen_device_close(host);
}

/* ----------------------------------------------------------------------- the k-th call fails -- */

static atomic_uint calls;
static unsigned int failing;

static int fail_kth(const char *name)
{
	return strcmp(name, "unlink") && ++calls == failing ? ENOMEM : 0;
}

/* Returns whether there was a k-th call; every run ends right, or with words. */
static bool with_kth(unsigned int k, const char *from, const char *packed, const char *back)
{
	struct pen_placement placement = { .tensor = NULL };
	struct pen_save_options coded = PEN_SAVE_OPTIONS_INIT;
	struct pen_model *model = NULL;
	struct pen_error err = { .code = 0 };
	uint64_t total;
	void *memory;
	int rc;

	coded.coded = 1;
	unlink(packed);
	unlink(back);
	calls = 0;
	failing = k;
	sys_fault_hook = fail_kth;
	rc = convert(PACK, from, packed, NULL, &err);
	if (!rc)
		rc = save(packed, NULL, weights, &coded, &err);
	if (!rc)
		rc = convert(UNPACK, packed, back, NULL, &err);
	if (!rc)
		rc = pen_model_open(packed, &model, &err);
	if (!rc) {
		placement.tensor = pen_model_find(model, "weights");
		rc = load(model, &placement, 1, true, &memory, &total, &err);
	}
	sys_fault_hook = NULL;
	CHECK(!rc || (err.code == rc && err.message[0]));
	CHECK(access(back, F_OK) || same_file(from, back));
	if (!rc) {
		CHECK(!memcmp(memory, weights, sizeof(weights)));
		release(memory, total);
	}
	pen_model_close(model);
	return calls >= k;
}

TEST(whatever_call_fails_is_told_and_no_wrong_byte_is_left)
{
	/* Each has its buffer for good. */
	const char *from = original(), *packed = in_scratch("packed"), *back = in_scratch("back");
	unsigned int k = 1;

	while (with_kth(k, from, packed, back))
		k++;
	CHECK(k > 100);
}

TEST_MAIN

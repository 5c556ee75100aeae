/* SPDX-License-Identifier: MIT */
/*
 * Torch's files from end to end: what is written from the memory of every device comes back the
 * same, verified; what is damaged is said to be, by file, record and byte; what fails leaves the
 * old file. That torch itself reads them, and that we read its own, is in tests/cli.
 */
#include <errno.h>
#include <sys/stat.h>
#include "base/digest.h"
#include "kit.h"
#include "sys/fault.h"

#define PICKLE "\x80\2}."	/* an empty dict */
#define STORAGES 7
#define OLD_SIZE 1000

#define PACKED (32 * KIB)	/* storages below this lie close together */

static const uint64_t sizes[STORAGES] = {
	5 * MIB + 3, 1, 0, PACKED - 1, 3 * MIB, PACKED, MIB + 4095,
};
static unsigned char bytes[16 * MIB];	/* what storages hold, one after the other */
static struct pen_report report = PEN_REPORT_INIT;
static struct pen_torch_checked checked = PEN_TORCH_CHECKED_INIT;

static uint64_t total(void)
{
	uint64_t sum = 0;

	for (int i = 0; i < STORAGES; i++)
		sum += sizes[i];
	return sum;
}

/* Storages in turn on each of `count` devices, NULL among them; freed by let_go(). */
static void fill(struct pen_torch_storage *storages, struct pen_device *const *devices, int count)
{
	unsigned char *from = bytes;

	pattern_fill(bytes, sizeof(bytes), 8 * MIB);
	for (int i = 0; i < STORAGES; i++) {
		struct pen_device *device = devices[i % count];
		void *memory;

		OK(pen_device_alloc(device, sizes[i] + 1, &memory, &kit_err));
		OK(pen_device_put(device, memory, from, sizes[i], &kit_err));
		storages[i] = (struct pen_torch_storage){
			.memory = memory, .bytes = sizes[i], .device = device,
		};
		from += sizes[i];
	}
}

static void let_go(const struct pen_torch_storage *storages)
{
	for (int i = 0; i < STORAGES; i++)
		OK(pen_device_free(storages[i].device, (void *)storages[i].memory, sizes[i] + 1,
				   &kit_err));
}

static int save(const char *path, const struct pen_torch_storage *storages,
		const struct pen_options *options)
{
	struct pen_torch_part part = { .name = "data.pkl", .bytes = PICKLE, .length = 4 };
	struct pen_torch_content content = PEN_TORCH_CONTENT_INIT;
	struct pen_torch_save *started;
	int rc;

	content.parts = &part;
	content.part_count = 1;
	content.storages = storages;
	content.storage_count = STORAGES;
	rc = pen_torch_save_start(path, storages[0].device, &content, options, &started, &kit_err);
	return rc ? rc : pen_torch_save_wait(started, &report, &kit_err);
}

static const char *scratch(const char *name)
{
	static char path[128];

	snprintf(path, sizeof(path), "%s/%s", kit_folder(DISK), name);
	return path;
}

/* Save from host memory: a file to read from, or to break. */
static const char *saved(const char *name)
{
	struct pen_torch_storage storages[STORAGES];
	struct pen_device *host = kit_device("host");

	fill(storages, &host, 1);
	OK(save(scratch(name), storages, NULL));
	let_go(storages);
	pen_device_close(host);
	return scratch(name);
}

/* Load every storage into `device` and look at it there. */
static int load(const char *path, struct pen_device *device, struct pen_options *options)
{
	struct pen_extent extents[STORAGES];
	struct pen_torch_check *check;
	struct pen_torch *file;
	unsigned char *memory, *back = malloc(total());
	uint64_t at = 0;
	int rc;

	OK(pen_torch_open(path, &file, &kit_err));
	OK(pen_device_alloc(device, total(), (void **)&memory, &kit_err));
	for (int i = 0; i < STORAGES; i++) {
		const struct pen_torch_record *record;
		char name[20];

		snprintf(name, sizeof(name), "data/%d", i);
		record = pen_torch_find(file, name);
		CHECK(record && record->bytes == sizes[i]);
		CHECK_EQ(record->offset % (sizes[i] < PACKED ? 64 : 4096), 0);
		extents[i] = (struct pen_extent){
			.object = pen_torch_object(file), .offset = record->offset,
			.memory = memory + at, .length = record->bytes,
		};
		at += sizes[i];
	}
	OK(pen_torch_check_new(file, options, &check, &kit_err));
	options->digests = pen_torch_check_digests(check);
	options->digest_count = 1;
	OK(pen_transfer(PEN_READ, device, extents, STORAGES, options, &report, &kit_err));
	rc = pen_torch_check_end(check, &checked, &kit_err);
	options->digest_count = 0;
	OK(pen_device_get(device, back, memory, total(), rc ? NULL : &kit_err));
	CHECK(rc || !memcmp(back, bytes, total()));
	OK(pen_device_free(device, memory, total(), NULL));
	pen_torch_close(file);
	free(back);
	return rc;
}

/* Both ways, between a file and these devices. */
static void around(const char *const *names, int count, struct pen_options *options)
{
	struct pen_torch_storage storages[STORAGES];
	struct pen_device *devices[4];
	const char *path = scratch("around.pt");

	for (int i = 0; i < count; i++) {
		devices[i] = kit_device(names[i]);
		if (!devices[i])
			SKIP("there is no GPU, not even a fake one");
	}
	kit_at("%s and others, %s, requests of %llu", names[0],
	       pen_transfer_name(options->transfer), (unsigned long long)options->request_size);
	fill(storages, devices, count);
	OK(save(path, storages, options));
	CHECK(report.bytes > total() && report.seconds > 0);
	CHECK_EQ(report.unverified_bytes, 0);
	for (int i = 0; i < count; i++) {
		OK(load(path, devices[i], options));
		CHECK_EQ(checked.by, PEN_TORCH_BY_TABLE);
		CHECK_EQ(checked.verified, total());
		CHECK_EQ(checked.unverified, 0);
	}
	let_go(storages);
	unlink(path);
	pen_trim();
	for (int i = 0; i < count; i++)
		pen_device_close(devices[i]);
}

TEST(what_is_saved_from_the_host_comes_back)
{
	static const char *const names[] = { "host" };
	struct pen_options options = PEN_OPTIONS_INIT;

	around(names, 1, &options);
	options.request_size = 64 * KIB;
	around(names, 1, &options);
}

TEST(what_is_saved_from_a_gpu_comes_back)
{
	static const char *const names[] = { "cuda:0" };
	static const int types[] = { PEN_AUTO, PEN_CPU_GPU, PEN_CPU_ASYNC_GPU, PEN_CPU_CACHED_GPU };
	struct pen_options options = PEN_OPTIONS_INIT;

	for (size_t i = 0; i < COUNT(types); i++) {
		options.transfer = types[i];
		around(names, 1, &options);
	}
}

TEST(what_is_saved_from_several_devices_comes_back)
{
	static const char *const names[] = { "cuda:0", "host", "cuda:1" };
	struct pen_options options = PEN_OPTIONS_INIT;

	around(names, 3, &options);
}

TEST(little_memory_is_enough)
{
	static const char *const names[] = { "cuda:0", "host" };
	struct pen_options options = PEN_OPTIONS_INIT;

	options.memory_limit = 128 * KIB;
	around(names, 2, &options);
}

TEST(requests_that_fall_short_change_nothing)
{
	static const char *const names[] = { "cuda:0", "host" };
	struct pen_options options = PEN_OPTIONS_INIT;

	options.inject = "short:2,short:3,fail:4:EIO,fail:6:EINTR";
	around(names, 2, &options);
}

/* -------------------------------------------------------------------- small storages -- */

#define MANY 600

/* More of them than are read back at a time, and on several devices. */
TEST(small_storages_lie_close_together_and_travel_in_few_requests)
{
	struct pen_torch_part part = { .name = "data.pkl", .bytes = PICKLE, .length = 4 };
	struct pen_torch_content content = PEN_TORCH_CONTENT_INIT;
	static struct pen_torch_storage storages[MANY];
	struct pen_device *host = kit_device("host"), *gpu = kit_device("cuda:0");
	const char *path = scratch("many.pt");
	struct pen_torch_save *started;
	struct pen_torch *file;
	void *on_gpu = bytes;
	struct stat st;

	pattern_fill(bytes, sizeof(bytes), 8 * MIB);
	if (gpu) {
		OK(pen_device_alloc(gpu, PACKED, &on_gpu, &kit_err));
		OK(pen_device_put(gpu, on_gpu, bytes, PACKED, &kit_err));
	}
	content.parts = &part;
	content.part_count = 1;
	content.storages = storages;
	content.storage_count = MANY;
	for (uint64_t size = 200; size < PACKED; size += PACKED - 201) {
		uint64_t all = 0;

		for (size_t i = 0; i < MANY; i++, all += size)
			storages[i] = (struct pen_torch_storage){
				.memory = i % 2 ? on_gpu : bytes, .bytes = size,
				.device = i % 2 && gpu ? gpu : host,
			};
		OK(pen_torch_save_start(path, NULL, &content, NULL, &started, &kit_err));
		OK(pen_torch_save_wait(started, &report, &kit_err));
		CHECK(report.requests < MANY / 4);
		CHECK(!stat(path, &st));
		CHECK((uint64_t)st.st_size < all + MANY * 300 + 3 * 4096);
		OK(pen_torch_open(path, &file, &kit_err));
		OK(pen_torch_verify(file, NULL, &checked, &kit_err));
		CHECK_EQ(checked.by, PEN_TORCH_BY_TABLE);
		CHECK(checked.verified >= all);
		pen_torch_close(file);
	}
	if (gpu)
		OK(pen_device_free(gpu, on_gpu, PACKED, &kit_err));
	pen_trim();
	if (gpu)
		pen_device_close(gpu);
	pen_device_close(host);
}

/* ------------------------------------------------------------------------------ cuFile -- */

TEST(what_cufile_writes_is_read_back_and_said_to_be_unverified)
{
	static const int types[] = {
		PEN_GPU_DIRECT, PEN_GPU_DIRECT_ASYNC, PEN_GPU_BATCH, PEN_GPU_BATCH_STREAM,
	};
	struct pen_device *both[2] = { kit_device("cuda:0"), kit_device("host") };
	struct pen_torch_storage storages[STORAGES];
	struct pen_options options = PEN_OPTIONS_INIT, plain = PEN_OPTIONS_INIT;
	uint64_t on_gpu = 0;

	if (!both[0])
		SKIP("there is no GPU, not even a fake one");
	fill(storages, both, 2);
	for (int i = 0; i < STORAGES; i += 2)
		on_gpu += sizes[i];
	for (size_t i = 0; i < COUNT(types); i++) {
		int rc;

		options.transfer = types[i];
		rc = save(scratch("direct.pt"), storages, &options);
		if (rc == -ENOTSUP)
			SKIP("cuFile cannot be had here");
		OK(rc);
		CHECK_EQ(report.unverified_bytes, on_gpu);
		OK(load(scratch("direct.pt"), both[0], &plain));
		CHECK_EQ(checked.verified, total());
		OK(load(scratch("direct.pt"), both[0], &options));
		CHECK_EQ(checked.verified, 0);
		CHECK_EQ(checked.unverified, total());
	}
	let_go(storages);
	pen_trim();
	pen_device_close(both[0]);
	pen_device_close(both[1]);
}

/* ---------------------------------------------------------------------------- verifying -- */

static void flip(const char *path, uint64_t at)
{
	int fd = open(path, O_RDWR | O_CLOEXEC);
	unsigned char byte;

	CHECK(fd >= 0 && pread(fd, &byte, 1, (off_t)at) == 1);
	byte ^= 0x10;
	CHECK(pwrite(fd, &byte, 1, (off_t)at) == 1);
	close(fd);
}

TEST(a_whole_file_is_verified_where_it_lies)
{
	const char *path = saved("whole.pt");
	struct pen_torch *file;
	struct pen_options options = PEN_OPTIONS_INIT;

	OK(pen_torch_open(path, &file, &kit_err));
	CHECK_EQ(pen_torch_verifiable(file), PEN_TORCH_BY_TABLE);
	for (options.request_size = 0; options.request_size <= 128 * KIB;
	     options.request_size += 128 * KIB) {
		OK(pen_torch_verify(file, &options, &checked, &kit_err));
		CHECK(checked.verified > total());
		CHECK_EQ(checked.unverified, 0);
		CHECK_EQ(checked.by, PEN_TORCH_BY_TABLE);
	}
	OK(pen_torch_verify(file, NULL, NULL, &kit_err));
	pen_torch_close(file);
}

/* Whatever byte of whatever record is wrong, it is found, and said where. */
TEST(a_flipped_bit_is_found_wherever_it_is)
{
	const char *path = saved("flipped.pt");
	struct pen_device *host = kit_device("host");
	struct pen_options options = PEN_OPTIONS_INIT;
	const struct pen_torch_record *records;
	struct pen_torch *file, *wrong_file;
	size_t count;

	OK(pen_torch_open(path, &file, &kit_err));
	count = pen_torch_records(file, &records);
	CHECK_EQ(count, STORAGES + 4);
	for (size_t i = 0; i < count; i++) {
		uint64_t wrong[] = { 0, records[i].bytes / 2, records[i].bytes - 1 };

		for (size_t j = 0; records[i].bytes && j < COUNT(wrong); j++) {
			uint64_t at = records[i].offset + wrong[j];
			bool storage = !strncmp(records[i].name, "data/", 5);

			kit_at("%s byte %llu", records[i].name, (unsigned long long)wrong[j]);
			flip(path, at);
			OK(pen_torch_open(path, &wrong_file, &kit_err));
			REFUSED(-EILSEQ, pen_torch_verify(wrong_file, NULL, NULL, &kit_err));
			pen_torch_close(wrong_file);
			CHECK_EQ(kit_err.domain, PEN_DOMAIN_FORMAT);
			CHECK(strstr(kit_err.object, "flipped.pt") != NULL);
			CHECK(strstr(kit_err.message, records[i].name) != NULL);
			CHECK(kit_err.offset <= (int64_t)at);
			CHECK(kit_err.offset >= (int64_t)records[i].offset);
			CHECK(!storage || at - (uint64_t)kit_err.offset < MIB);
			if (storage)
				REFUSED(-EILSEQ, load(path, host, &options));
			flip(path, at);
		}
	}
	pen_torch_close(file);
	OK(pen_torch_open(path, &file, &kit_err));
	OK(pen_torch_verify(file, NULL, NULL, &kit_err));
	pen_torch_close(file);
	pen_device_close(host);
}

TEST(what_is_loaded_in_part_is_verified_by_whole_chunks)
{
	const char *path = saved("part.pt");
	struct pen_device *host = kit_device("host");
	struct pen_options options = PEN_OPTIONS_INIT;
	const struct pen_torch_record *record;
	struct pen_torch_check *check;
	struct pen_torch *file;
	struct pen_extent extent = { .memory = bytes, .length = 2 * MIB + 4096 };

	OK(pen_torch_open(path, &file, &kit_err));
	record = pen_torch_find(file, "data/0");
	extent.object = pen_torch_object(file);
	extent.offset = record->offset + MIB;
	OK(pen_torch_check_new(file, &options, &check, &kit_err));
	options.digests = pen_torch_check_digests(check);
	options.digest_count = 1;
	OK(pen_transfer(PEN_READ, host, &extent, 1, &options, NULL, &kit_err));
	OK(pen_torch_check_end(check, &checked, &kit_err));
	CHECK_EQ(checked.verified, 3 * MIB / 2);
	CHECK_EQ(checked.unverified, MIB);	/* counted by the chunks it is in */
	pen_torch_close(file);
	pen_device_close(host);
}

TEST(a_small_record_is_verified_when_it_is_read)
{
	const char *path = saved("small.pt");
	const struct pen_torch_record *record;
	struct pen_torch *file;
	char pickle[4];

	OK(pen_torch_open(path, &file, &kit_err));
	record = pen_torch_find(file, "data.pkl");
	CHECK(record && record->bytes == 4);
	OK(pen_torch_read(file, record, pickle, &kit_err));
	CHECK(!memcmp(pickle, PICKLE, 4));
	flip(path, record->offset);
	REFUSED(-EILSEQ, pen_torch_read(file, record, pickle, &kit_err));
	CHECK(pen_torch_find(file, "data") == NULL && pen_torch_find(file, "data/7") == NULL);
	pen_torch_close(file);
}

/* ------------------------------------------------------------------------------- tensors -- */

/* A pickle of one tensor: `shape` and `stride` are tuples of two numbers each. */
#define TENSOR(key, offset, shape, stride)                                                     \
	"ctorch._utils\n_rebuild_tensor_v2\n((U\7storagectorch\nFloatStorage\nU\1" key         \
	"U\3cpuK\12tQ" offset shape "\x86" stride "\x86\x89}tR."
#define NUMBERS(a, b) "K" a "K" b
#define HUGE_NUMBER "\x8a\10\xff\xff\xff\xff\xff\xff\xff\x7f"

/* What is said of the tensors of a file with this pickle and one storage of 100 bytes. */
static int tensors_of(const char *pickle, size_t length, struct pen_torch_tensor *first)
{
	struct pen_torch_part part = { .name = "data.pkl", .bytes = pickle, .length = length };
	struct pen_torch_storage storage = { .memory = bytes, .bytes = 100 };
	struct pen_torch_content content = PEN_TORCH_CONTENT_INIT;
	const struct pen_torch_tensor *tensors;
	struct pen_torch_save *started;
	struct pen_torch *file;
	size_t count;
	int rc;

	content.parts = &part;
	content.part_count = 1;
	content.storages = &storage;
	content.storage_count = 1;
	OK(pen_torch_save_start(scratch("t.pt"), NULL, &content, NULL, &started, &kit_err));
	OK(pen_torch_save_wait(started, NULL, &kit_err));
	OK(pen_torch_open(scratch("t.pt"), &file, &kit_err));
	rc = pen_torch_tensors(file, &tensors, &count, &kit_err);
	CHECK_EQ(count, rc ? 0 : 1);
	if (!rc)
		*first = tensors[0];
	CHECK(rc || pen_torch_find(file, "data/0")->offset + 4 == first->offset ||
	      !first->bytes);
	pen_torch_close(file);
	return rc;
}

#define TENSORS_OF(text) tensors_of(text, sizeof(text) - 1, &tensor)

TEST(tensors_lie_in_their_storages_or_are_refused)
{
	struct pen_torch_tensor tensor;

	OK(TENSORS_OF(TENSOR("0", "K\1", NUMBERS("\2", "\3"), NUMBERS("\3", "\1"))));
	CHECK_EQ(tensor.rank, 2);
	CHECK_EQ(tensor.bytes, 24);
	CHECK_EQ(tensor.item_bits, 32);
	CHECK_EQ(tensor.dtype, PEN_F32);
	/* The last element is the storage's last: 1 + 1 * 22 + 1 * 1 is number 24 of 25. */
	OK(TENSORS_OF(TENSOR("0", "K\1", NUMBERS("\2", "\2"), NUMBERS("\26", "\1"))));
	REFUSED(-EBADMSG,
		TENSORS_OF(TENSOR("0", "K\1", NUMBERS("\2", "\2"), NUMBERS("\30", "\1"))));
	CHECK(strstr(kit_err.message, "leaves its storage") != NULL);
	/* No element, no byte: the offset does not matter. */
	OK(TENSORS_OF(TENSOR("0", "K\177", NUMBERS("\0", "\2"), NUMBERS("\2", "\1"))));
	CHECK_EQ(tensor.bytes, 0);
	REFUSED(-EBADMSG,
		TENSORS_OF(TENSOR("1", "K\1", NUMBERS("\1", "\1"), NUMBERS("\1", "\1"))));
	CHECK(strstr(kit_err.message, "not in the file") != NULL);
	REFUSED(-EBADMSG, TENSORS_OF(TENSOR("0", "K\1", HUGE_NUMBER HUGE_NUMBER,
					    NUMBERS("\0", "\0"))));
	CHECK(strstr(kit_err.message, "64 bits") != NULL);
	REFUSED(-EBADMSG, TENSORS_OF(TENSOR("0", "K\1", NUMBERS("\3", "\3"),
					    HUGE_NUMBER HUGE_NUMBER)));
	REFUSED(-EBADMSG, TENSORS_OF(TENSOR("0", HUGE_NUMBER, NUMBERS("\3", "\3"),
					    NUMBERS("\3", "\1"))));
}

/* ------------------------------------------------------------------------------- failing -- */

TEST(the_old_file_stays_until_the_new_one_is_whole)
{
	const char *path = saved("old.pt");
	struct pen_torch_storage storages[STORAGES];
	struct pen_device *host = kit_device("host");
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_torch *file;
	unsigned int before = kit_list(kit_folder(DISK), NULL);

	fill(storages, &host, 1);
	options.inject = "fail:1+:ENOSPC";
	REFUSED(-ENOSPC, save(path, storages, &options));
	options.inject = "fail:3+:EIO";
	REFUSED(-EIO, save(path, storages, &options));
	OK(pen_torch_open(path, &file, &kit_err));
	OK(pen_torch_verify(file, NULL, NULL, &kit_err));
	pen_torch_close(file);
	CHECK_EQ(kit_list(kit_folder(DISK), NULL), before);
	let_go(storages);
	pen_device_close(host);
}

/* One small save over the file that is there. */
static int save_small(const char *path)
{
	struct pen_torch_part part = { .name = "data.pkl", .bytes = PICKLE, .length = 4 };
	struct pen_torch_storage storages[2] = {
		{ .memory = bytes, .bytes = 70000 }, { .memory = bytes + 70000, .bytes = 5 },
	};
	struct pen_torch_content content = PEN_TORCH_CONTENT_INIT;
	struct pen_torch_save *started;
	int rc;

	content.parts = &part;
	content.part_count = 1;
	content.storages = storages;
	content.storage_count = 2;
	rc = pen_torch_save_start(path, NULL, &content, NULL, &started, &kit_err);
	return rc ? rc : pen_torch_save_wait(started, NULL, &kit_err);
}

/* Whatever call fails, there is the old file or the new one, and nothing beside it. */
TEST(every_call_of_a_save_may_fail)
{
	const char *path = scratch("calls.pt");
	struct pen_torch *file;
	unsigned int k, failed = 0;
	bool replaced = false;
	struct stat st;

	kit_write(path, 0, OLD_SIZE, 0x77);
	for (k = 1;; k++) {
		int rc;

		kit_at("call %u", k);
		kit_calls = 0;
		kit_wrong_call = k;
		sys_fault_hook = kit_fail_one;
		rc = save_small(path);
		sys_fault_hook = NULL;
		failed += rc != 0;
		CHECK(!rc || (kit_err.code == rc && kit_err.message[0]));
		CHECK_EQ(kit_list(kit_folder(DISK), NULL), 1);
		CHECK(!stat(path, &st));
		replaced |= !rc || st.st_size != OLD_SIZE;
		if (replaced) {
			OK(pen_torch_open(path, &file, &kit_err));
			OK(pen_torch_verify(file, NULL, NULL, &kit_err));
			pen_torch_close(file);
		}
		if (kit_calls < k)
			break;
	}
	CHECK(failed > 10 && k > 30);
}

TEST(a_save_can_be_cancelled)
{
	const char *path = scratch("cancelled.pt");
	struct pen_torch_part part = { .name = "data.pkl", .bytes = PICKLE, .length = 4 };
	struct pen_torch_content content = PEN_TORCH_CONTENT_INIT;
	struct pen_torch_storage storages[STORAGES];
	struct pen_device *host = kit_device("host");
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_torch_save *started;

	fill(storages, &host, 1);
	content.parts = &part;
	content.part_count = 1;
	content.storages = storages;
	content.storage_count = STORAGES;
	options.inject = "delay:1+:50ms";
	options.request_size = 64 * KIB;
	OK(pen_torch_save_start(path, NULL, &content, &options, &started, &kit_err));
	pen_job_cancel(pen_torch_save_job(started));
	REFUSED(-ECANCELED, pen_torch_save_wait(started, NULL, &kit_err));
	CHECK(access(path, F_OK) != 0);
	let_go(storages);
	pen_device_close(host);
}

TEST(groups_tell_which_storages_may_change_again)
{
	struct pen_torch_part part = { .name = "data.pkl", .bytes = PICKLE, .length = 4 };
	struct pen_torch_content content = PEN_TORCH_CONTENT_INIT;
	struct pen_torch_storage storages[STORAGES];
	struct pen_device *host = kit_device("host");
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_torch_save *started;
	uint64_t groups[STORAGES];
	bool seen[STORAGES] = { false };
	size_t count, all = 0;

	fill(storages, &host, 1);
	for (size_t i = 0; i < STORAGES; i++)
		storages[i].group = i;
	content.parts = &part;
	content.part_count = 1;
	content.storages = storages;
	content.storage_count = STORAGES;
	options.groups = STORAGES;
	OK(pen_torch_save_start(scratch("groups.pt"), NULL, &content, &options, &started,
				&kit_err));
	while ((count = pen_job_gathered(pen_torch_save_job(started), groups, STORAGES, 10)) > 0)
		for (size_t i = 0; i < count; i++, all++) {
			CHECK(!seen[groups[i]]);
			seen[groups[i]] = true;
			memset((void *)storages[groups[i]].memory, 0xee, sizes[groups[i]]);
		}
	CHECK_EQ(all, STORAGES);
	OK(pen_torch_save_wait(started, &report, &kit_err));
	options.groups = 0;
	OK(load(scratch("groups.pt"), host, &options));
	let_go(storages);
	pen_device_close(host);
}

/* All of it in one group; the memory changes as soon as that is told. */
static void memory_changes_when_gathered(const char *name, const char *inject, int rc)
{
	struct pen_torch_part part = { .name = "data.pkl", .bytes = PICKLE, .length = 4 };
	struct pen_torch_content content = PEN_TORCH_CONTENT_INIT;
	struct pen_torch_storage storages[STORAGES];
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_device *device = kit_device(name);
	struct pen_torch_save *started;
	unsigned char noise[4096];

	if (!device)
		SKIP("there is no GPU, not even a fake one");
	memset(noise, 0xee, sizeof(noise));
	fill(storages, &device, 1);
	content.parts = &part;
	content.part_count = 1;
	content.storages = storages;
	content.storage_count = STORAGES;
	options.groups = 1;
	options.inject = inject;
	/* There is room for a part only, so it fails before all is gathered. */
	if (rc)
		options.memory_limit = 128 * KIB;
	OK(pen_torch_save_start(scratch("changes.pt"), NULL, &content, &options, &started,
				&kit_err));
	CHECK_EQ(pen_torch_save_gathered(started, 30), rc ? -ECANCELED : 0);
	if (!rc)
		CHECK_EQ(pen_torch_save_gathered(started, 0), 0);
	for (int i = 0; i < STORAGES && !rc; i++)
		for (uint64_t at = 0; at < sizes[i]; at += sizeof(noise))
			OK(pen_device_put(device, (unsigned char *)storages[i].memory + at, noise,
					  sizes[i] - at < sizeof(noise) ? sizes[i] - at
									: sizeof(noise),
					  &kit_err));
	CHECK_EQ(pen_torch_save_wait(started, &report, &kit_err), rc);
	options = (struct pen_options)PEN_OPTIONS_INIT;
	if (!rc) {
		CHECK_EQ(report.gathering, PEN_GATHERING_AHEAD);
		CHECK(report.gathered_seconds > 0 &&
		      report.gathered_seconds <= report.stored_seconds &&
		      report.stored_seconds <= report.seconds);
		OK(load(scratch("changes.pt"), device, &options));
	}
	let_go(storages);
	unlink(scratch("changes.pt"));
	pen_trim();
	pen_device_close(device);
}

TEST(a_state_may_change_once_it_is_gathered_from_the_host)
{
	memory_changes_when_gathered("host", NULL, 0);
}

TEST(a_state_may_change_once_it_is_gathered_from_a_gpu)
{
	memory_changes_when_gathered("cuda:0", NULL, 0);
}

TEST(who_waits_for_a_save_that_fails_is_told)
{
	memory_changes_when_gathered("host", "fail:1+:ENXIO", -ENXIO);
}

TEST(without_groups_gathered_means_written)
{
	struct pen_torch_part part = { .name = "data.pkl", .bytes = PICKLE, .length = 4 };
	struct pen_torch_content content = PEN_TORCH_CONTENT_INIT;
	struct pen_torch_save *started;

	content.parts = &part;
	content.part_count = 1;
	OK(pen_torch_save_start(scratch("plain.pt"), NULL, &content, NULL, &started, &kit_err));
	OK(pen_torch_save_gathered(started, 30));
	OK(pen_torch_save_wait(started, &report, &kit_err));
	CHECK_EQ(report.gathering, PEN_GATHERING_NONE);
	CHECK(report.gathered_seconds == 0);
}

TEST(what_makes_no_sense_is_refused)
{
	struct pen_torch_part parts[2] = {
		{ .name = "data.pkl", .bytes = PICKLE, .length = 4 },
		{ .name = "data/0", .bytes = "x", .length = 1 },
	};
	struct pen_torch_storage storage = { .memory = bytes, .bytes = 1 };
	struct pen_torch_content good = PEN_TORCH_CONTENT_INIT, wrong;
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_torch_save *started;
	const char *path = scratch("refused.pt");
	char name[1100];

	good.parts = parts;
	good.part_count = 1;
	good.storages = &storage;
	good.storage_count = 1;
	memset(name, 'x', sizeof(name));
	name[sizeof(name) - 1] = 0;
#define WRONG(rc, change)                                                                      \
	do {                                                                                   \
		wrong = good;                                                                  \
		change;                                                                        \
		REFUSED(rc, pen_torch_save_start(path, NULL, &wrong, &options, &started,       \
						 &kit_err));                                   \
		CHECK(!started);                                                               \
	} while (0)
	WRONG(-EINVAL, wrong.size = 0);
	WRONG(-EINVAL, wrong.part_count = 0);
	WRONG(-EINVAL, wrong.part_count = 2);	/* two records of one name */
	WRONG(-EINVAL, wrong.archive = "");
	WRONG(-EINVAL, wrong.archive = "a/b");
	WRONG(-EINVAL, wrong.archive = name);
	WRONG(-EINVAL, storage.key = name);
	storage.key = NULL;
	WRONG(-EINVAL, storage.memory = NULL);
	storage.memory = bytes;
	WRONG(-EINVAL, storage.reserved[1] = 1);
	storage.reserved[1] = 0;
	WRONG(-EFBIG, storage.bytes = UINT64_MAX - 5000);
	storage.bytes = 1;
	WRONG(-EINVAL, options.allocate = 1);
	options.allocate = 0;
	path = "/nowhere/at/all.pt";
	WRONG(-ENOENT, (void)0);
	CHECK_EQ(kit_list(kit_folder(DISK), NULL), 0);
}

TEST_MAIN

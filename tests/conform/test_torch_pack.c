/* SPDX-License-Identifier: MIT */
/*
 * Several objects of torch's in one file: each comes back from its place as if it were alone, from
 * and to the memory of every device, in parts as well, verified; what fails leaves the old file.
 * That torch itself reads them is in tests/python/test_dcp.py.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include "kit.h"
#include "sys/fault.h"

#define PICKLE "\x80\2}."	/* an empty dict */
#define ITEMS 6
#define OLD_SIZE 1000

/* Bytes of one storage each; the third has none, the fifth item is raw. */
static const uint64_t sizes[ITEMS] = { 3 * MIB + 5, 1, 0, 4096, 100000, 2 * MIB };
static unsigned char bytes[8 * MIB], back[8 * MIB];
static struct pen_torch_storage storages[ITEMS];
static struct pen_torch_item items[ITEMS];

static const char *scratch(const char *name)
{
	static char path[128];

	snprintf(path, sizeof(path), "%s/%s", kit_folder(DISK), name);
	return path;
}

/* Items whose storages are on a device. */
static void fill(struct pen_device *device)
{
	unsigned char *from = bytes;

	pattern_fill(bytes, sizeof(bytes), 8 * MIB);
	memset(items, 0, sizeof(items));
	for (int i = 0; i < ITEMS; i++) {
		void *memory;

		OK(pen_device_alloc(device, sizes[i] + 1, &memory, &kit_err));
		OK(pen_device_put(device, memory, from, sizes[i], &kit_err));
		storages[i] = (struct pen_torch_storage){ .memory = memory, .bytes = sizes[i],
							  .device = device };
		items[i] = (struct pen_torch_item){ .bytes = PICKLE, .length = 4,
						    .storages = &storages[i], .storage_count = 1 };
		from += sizes[i];
	}
	items[4] = (struct pen_torch_item){ .bytes = bytes, .length = 100000,
					    .flags = PEN_TORCH_RAW };
}

static void let_go(struct pen_device *device)
{
	for (int i = 0; i < ITEMS; i++)
		OK(pen_device_free(device, (void *)storages[i].memory, sizes[i] + 1, &kit_err));
}

static int save(const char *path, struct pen_device *device, const struct pen_options *options)
{
	struct pen_torch_save *started;
	int rc = pen_torch_pack_start(path, device, items, ITEMS, options, &started, &kit_err);

	return rc ? rc : pen_torch_save_wait(started, NULL, &kit_err);
}

struct opened {
	struct pen_object *object;
	struct pen_torch *files[ITEMS];
	size_t count;
};

/* All items but the raw one. */
static void open_all(const char *path, struct opened *opened)
{
	opened->count = 0;
	OK(pen_object_open(path, PEN_READ, 0, &opened->object, &kit_err));
	for (int i = 0; i < ITEMS; i++)
		if (!(items[i].flags & PEN_TORCH_RAW))
			OK(pen_torch_open_item(opened->object, items[i].offset, items[i].size,
					       &opened->files[opened->count++], &kit_err));
}

static void close_all(struct opened *opened)
{
	for (size_t i = 0; i < opened->count; i++)
		pen_torch_close(opened->files[i]);
	pen_object_close(opened->object);
}

/* One job for all storages, or for a part of the first, into host memory; what it verified. */
static int load(struct opened *opened, uint64_t most, struct pen_torch_checked *checked)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_device *host = kit_device("host");
	struct pen_extent extents[ITEMS];
	struct pen_torch_check *check;
	unsigned char *to = back;
	size_t count = 0;
	int rc, wrong;

	for (size_t i = 0; i < opened->count; i++) {
		const struct pen_torch_record *record = pen_torch_find(opened->files[i], "data/0");

		CHECK(record && (record->offset % 4096 == 0 || !record->bytes));
		extents[count++] = (struct pen_extent){
			.object = opened->object, .offset = record->offset, .memory = to,
			.length = record->bytes < most ? record->bytes : most,
		};
		to += record->bytes;
		if (most < UINT64_MAX)
			break;
	}
	OK(pen_torch_check_items(opened->files, opened->count, &options, &check, &kit_err));
	options.digests = pen_torch_check_digests(check);
	options.digest_count = 1;
	rc = pen_transfer(PEN_READ, host, extents, count, &options, NULL, &kit_err);
	wrong = pen_torch_check_end(check, checked, rc ? NULL : &kit_err);
	pen_device_close(host);
	return rc ? rc : wrong;
}

static void around(const char *name, const struct pen_options *options)
{
	struct pen_torch_checked checked = PEN_TORCH_CHECKED_INIT;
	struct pen_device *device = kit_device(name);
	const char *path = scratch("around.distcp");
	unsigned char raw[100000], *from = bytes, *to = back;
	struct opened opened;
	int fd;

	fill(device);
	OK(save(path, device, options));
	open_all(path, &opened);
	memset(back, 0, sizeof(back));
	OK(load(&opened, UINT64_MAX, &checked));
	CHECK_EQ(checked.by, PEN_TORCH_BY_TABLE);
	CHECK_EQ(checked.unverified, 0);
	for (int i = 0; i < ITEMS; i++, from += sizes[i - 1]) {
		if (items[i].flags & PEN_TORCH_RAW)
			continue;
		CHECK(!memcmp(to, from, sizes[i]));
		to += sizes[i];
	}
	close_all(&opened);
	fd = open(path, O_RDONLY);
	CHECK_EQ(pread(fd, raw, sizeof(raw), (off_t)items[4].offset), sizeof(raw));
	close(fd);
	CHECK(!memcmp(raw, bytes, sizeof(raw)));
	let_go(device);
	pen_device_close(device);
}

TEST(several_objects_come_back_from_one_file)
{
	struct pen_options options = PEN_OPTIONS_INIT;

	around("host", &options);
	options.memory_limit = 256 << 10;
	around("host", &options);
}

TEST(several_objects_come_back_that_a_gpu_had)
{
	struct pen_options options = PEN_OPTIONS_INIT;

	around("cuda:0", &options);
}

TEST(a_part_is_verified_by_whole_chunks_and_damage_is_found_where_it_is)
{
	struct pen_torch_checked checked = PEN_TORCH_CHECKED_INIT;
	struct pen_device *host = kit_device("host");
	const char *path = scratch("part.distcp");
	struct opened opened;
	uint64_t at;
	int fd;

	fill(host);
	OK(save(path, host, NULL));
	open_all(path, &opened);
	OK(load(&opened, 2 * MIB + 5, &checked));
	CHECK(checked.verified > 0 && checked.unverified > 0);
	at = pen_torch_find(opened.files[0], "data/0")->offset + 1000;
	fd = open(path, O_WRONLY);
	CHECK_EQ(pwrite(fd, "wrong", 5, (off_t)at), 5);
	close(fd);
	close_all(&opened);
	open_all(path, &opened);
	REFUSED(-EILSEQ, load(&opened, 2 * MIB + 5, NULL));
	CHECK(kit_err.offset <= (int64_t)at && kit_err.offset > (int64_t)(at - MIB));
	close_all(&opened);
	let_go(host);
	pen_device_close(host);
}

/* Whatever call fails, there is the old file or the new one, and nothing beside it. */
TEST(every_call_of_a_save_of_several_may_fail)
{
	const char *path = scratch("calls.distcp");
	struct pen_device *host = kit_device("host");
	unsigned int k, failed = 0;
	struct opened opened;
	struct stat st;

	fill(host);
	kit_write(path, 0, OLD_SIZE, 0x77);
	for (k = 1;; k++) {
		int rc;

		kit_at("call %u", k);
		kit_calls = 0;
		kit_wrong_call = k;
		sys_fault_hook = kit_fail_one;
		rc = save(path, NULL, NULL);
		sys_fault_hook = NULL;
		failed += rc != 0;
		CHECK(!rc || (kit_err.code == rc && kit_err.message[0]));
		CHECK_EQ(kit_list(kit_folder(DISK), NULL), 1);
		CHECK(!stat(path, &st));
		if (!rc || st.st_size != OLD_SIZE) {
			open_all(path, &opened);
			OK(load(&opened, UINT64_MAX, NULL));
			close_all(&opened);
		}
		if (kit_calls < k)
			break;
		kit_write(path, 0, OLD_SIZE, 0x77);
		CHECK(!truncate(path, OLD_SIZE));
	}
	CHECK(failed > 10 && k > 30);
	let_go(host);
	pen_device_close(host);
}

TEST(what_makes_no_sense_in_an_item_is_refused)
{
	struct pen_device *host = kit_device("host");
	const char *path = scratch("refused.distcp");
	struct pen_torch *files[2], *none;
	struct pen_torch_save *started;
	struct pen_torch_check *check;
	struct opened opened;

	fill(host);
	REFUSED(-EINVAL, pen_torch_pack_start(path, host, items, 0, NULL, &started, &kit_err));
	items[0].flags = PEN_TORCH_RAW;
	REFUSED(-EINVAL, save(path, host, NULL));
	items[0].flags = 2;
	REFUSED(-EINVAL, save(path, host, NULL));
	items[0].flags = 0;
	items[0].reserved[1] = 1;
	REFUSED(-EINVAL, save(path, host, NULL));
	items[0].reserved[1] = 0;
	items[0].bytes = NULL;
	REFUSED(-EINVAL, save(path, host, NULL));
	items[0].bytes = PICKLE;
	storages[0].key = "name";
	REFUSED(-EINVAL, save(path, host, NULL));
	storages[0].key = NULL;
	OK(save(path, host, NULL));
	open_all(path, &opened);
	files[0] = opened.files[1];
	files[1] = opened.files[0];
	REFUSED(-EINVAL, pen_torch_check_items(files, 2, NULL, &check, &kit_err));
	REFUSED(-EINVAL, pen_torch_check_items(files, 0, NULL, &check, &kit_err));
	REFUSED(-EBADMSG, pen_torch_open_item(opened.object, items[5].offset, items[5].size + 1,
					      &none, &kit_err));
	REFUSED(-EBADMSG, pen_torch_open_item(opened.object, items[1].offset + 64, items[1].size,
					      &none, &kit_err));
	close_all(&opened);
	let_go(host);
	pen_device_close(host);
}

TEST_MAIN

/* SPDX-License-Identifier: MIT */
/*
 * The power goes at any moment of a write with commit. From the log of power.h every crash point is
 * played: a write that no fdatasync followed may be there, missing or torn; a rename that no fsync
 * of the directory followed may have happened or not. In each outcome the target must be old or new
 * and complete, and once commit has returned it must be new. What is old stays so because nothing
 * touches it: it is looked at before every system call.
 *
 * Also the plain order, as the fault hook sees it, for the path the wrappers cannot see: io_uring.
 *
 * Not covered: blocks torn below 512 bytes, disks that lie about flushes, file systems that
 * reorder what POSIX lets them keep in order (linkat before rename), reserved blocks that come up
 * with old data instead of zeros, and the direct writes of io_uring beyond their order.
 */
#include "../conform/kit.h"
#include "power.h"
#include "sys/fault.h"

#define OLD_SIZE 1000u
#define OLD_BYTE 0x5a		/* the pattern would pass for the beginning of the new file */
#define SIZE (MIB + 777)	/* below what is worth a ring, so every write is a pwrite */
#define BLOCK 512u

/* ------------------------------------------------------------------------------- playing it -- */

static char target[256];
static ino_t old_inode;			/* of what is replaced; 0 where there is nothing */
static unsigned char image[(SIZE + BLOCK - 1) / BLOCK];	/* blocks of the new file that hold */

static atomic_uint looks;

/* Before every system call: the name leads to the old file as it was, or to all of the new one. */
static int look_at_target(const char *call)
{
	unsigned char bytes[OLD_SIZE + 1];
	ino_t inode = inode_named(target);
	bool good = inode == old_inode;
	int fd;

	if (!recording)
		return 0;
	if (inode != old_inode) {
		good = kit_holds(target, SIZE);
	} else if (inode) {
		fd = open(target, O_RDONLY | O_CLOEXEC);
		good = pread(fd, bytes, sizeof(bytes), 0) == OLD_SIZE;
		for (unsigned int i = 0; good && i < OLD_SIZE; i++)
			good = bytes[i] == OLD_BYTE;
		close(fd);
	}
	if (!good) {
		fprintf(stderr, "before %s the target is neither old nor new\n", call);
		exit(1);
	}
	looks++;
	return 0;
}

/* Does something find its name, and not one on the way there? */
static bool is_naming(const struct event *event)
{
	return event->kind == NAME &&
	       (!strcmp(event->name, "target") || !strncmp(event->name, "model", 5));
}

/* Blocks that lie wholly in the write; the ragged end counts as whole. */
static void apply(const struct event *write, unsigned int tear)
{
	uint64_t end = write->offset + write->length;

	for (uint64_t block = (write->offset + BLOCK - 1) / BLOCK;
	     block * BLOCK < end && ((block + 1) * BLOCK <= end || end == SIZE); block++)
		if (!tear || !coin(tear))
			image[block] = 1;
}

/* One outcome of losing power after the first `cut` events. */
static void lose_power(unsigned int cut, ino_t folder)
{
	bool renamed = false, returned = false;
	ino_t inode = 0;

	memset(image, 0, sizeof(image));
	for (unsigned int i = 0; i < cut; i++) {
		const struct event *event = &events[i];

		returned |= event->kind == DONE;
		if (is_naming(event)) {
			inode = event->inode;
			renamed = flushed(i, cut, folder) || coin(2);
		}
	}
	CHECK(!returned || (renamed && flushed(0, cut, folder)));
	if (!renamed) {
		for (unsigned int i = 0; i < cut; i++)
			CHECK(events[i].kind != WRITE || events[i].inode != old_inode);
		return;
	}
	for (unsigned int i = 0; i < cut; i++)
		if (events[i].kind == WRITE && events[i].inode == inode) {
			if (flushed(i, cut, inode))
				apply(&events[i], 0);
			else if (coin(2))
				apply(&events[i], 2);
		}
	for (size_t i = 0; i < sizeof(image); i++)
		if (!image[i]) {
			fprintf(stderr, "power lost after event %u of %u: block %zu of the new "
				"file may be missing\n", cut, event_count, i);
			exit(1);
		}
}

static void store(uint64_t size)
{
	struct pen_extent extent = { .length = size };
	struct pen_device *host;

	OK(pen_device_open("host", &host, &kit_err));
	OK(pen_device_alloc(host, size, &extent.memory, &kit_err));
	pattern_fill(extent.memory, size, 0);
	recording = true;
	sys_fault_hook = look_at_target;
	OK(pen_object_open(target, PEN_WRITE, size, &extent.object, &kit_err));
	OK(pen_transfer(PEN_WRITE, host, &extent, 1, NULL, NULL, &kit_err));
	OK(pen_object_commit(extent.object, &kit_err));
	note(&(struct event){ .kind = DONE });
	sys_fault_hook = NULL;
	recording = false;
	pen_object_close(extent.object);
	OK(pen_device_free(host, extent.memory, size, &kit_err));
	pen_device_close(host);
}

static void lose_power_everywhere(bool replace)
{
	uint64_t written = 0;
	bool named = false;
	ino_t inode;

	snprintf(target, sizeof(target), "%s/target", kit_folder(DISK));
	if (replace)
		kit_write(target, 0, OLD_SIZE, OLD_BYTE);
	old_inode = inode_named(target);
	CHECK(!old_inode == !replace);
	store(SIZE);
	CHECK(kit_holds(target, SIZE));
	inode = inode_named(target);
	CHECK(inode != old_inode && looks > event_count);
	for (unsigned int i = 0; i < event_count; i++) {
		if (events[i].kind == WRITE && events[i].inode == inode)
			written += events[i].length;
		named |= is_naming(&events[i]) && events[i].inode == inode;
	}
	/* The log has every byte: what went by io_uring, nobody would have seen. */
	CHECK_EQ(written, SIZE);
	CHECK(named);
	for (unsigned int cut = 0; cut <= event_count; cut++)
		for (int outcome = 0; outcome < 16; outcome++)
			lose_power(cut, inode_named(kit_folder(DISK)));
}

TEST(power_lost_while_creating_leaves_nothing_or_all)
{
	lose_power_everywhere(false);
}

TEST(power_lost_while_replacing_leaves_old_or_new)
{
	lose_power_everywhere(true);
}

/* -------------------------------------------------------------------- the order, by the hook -- */

static char order[EVENTS_MAX][24];
static atomic_uint ordered;

static int record(const char *name)
{
	unsigned int at = ordered++;

	if (at < EVENTS_MAX)
		snprintf(order[at], sizeof(order[0]), "%s", name);
	return 0;
}

static unsigned int first(const char *name)
{
	for (unsigned int i = 0; i < ordered; i++)
		if (!strcmp(order[i], name))
			return i;
	return UINT32_MAX;
}

static unsigned int last(const char *name)
{
	for (unsigned int i = ordered; i-- > 0;)
		if (!strcmp(order[i], name))
			return i;
	return 0;
}

TEST(data_is_flushed_then_named_then_its_folder_is_flushed)
{
	struct pen_extent extent = { .length = 9 * MIB + 1 };
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_device *host;
	unsigned int moved, back;

	if (!kit_has_direct() || !kit_has_uring()) {
		kit_not_run("direct writes by io_uring");
		SKIP("direct writes by io_uring are not to be had here");
	}
	snprintf(target, sizeof(target), "%s/target", kit_folder(DISK));
	kit_pattern(target, 1000);
	OK(pen_device_open("host", &host, &kit_err));
	OK(pen_device_alloc(host, extent.length, &extent.memory, &kit_err));
	pattern_fill(extent.memory, extent.length, 0);
	sys_fault_hook = record;
	OK(pen_object_open(target, PEN_WRITE, extent.length, &extent.object, &kit_err));
	OK(pen_transfer(PEN_WRITE, host, &extent, 1, NULL, &report, &kit_err));
	moved = ordered;
	OK(pen_object_commit(extent.object, &kit_err));
	back = ordered;
	sys_fault_hook = NULL;
	CHECK(kit_has_path(&report, "direct-uring"));
	CHECK(first("io_uring_enter") < moved && back <= EVENTS_MAX);
	CHECK(last("pwrite") < moved && last("io_uring_enter") < moved);
	CHECK(first("fallocate") < last("fdatasync"));
	CHECK(last("fdatasync") >= moved && last("fdatasync") < last("linkat"));
	CHECK(last("linkat") < first("rename"));
	CHECK_EQ(first("rename"), last("rename"));
	CHECK(first("rename") < last("fsync") && last("fsync") < back);
	pen_object_close(extent.object);
	CHECK(kit_holds(target, extent.length));
	OK(pen_device_free(host, extent.memory, extent.length, &kit_err));
	pen_device_close(host);
}

/* Of a model no file is found before all are on the disk, and the index after all that it names. */
TEST(power_lost_while_a_model_is_saved_finds_no_index_without_its_files)
{
	static const uint64_t lengths[] = { 5000, 3000 };
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;
	struct pen_save_tensor tensors[] = {
		{ .name = "a", .dtype = PEN_U8, .rank = 1, .shape = &lengths[0] },
		{ .name = "b", .dtype = PEN_U8, .rank = 1, .shape = &lengths[1] },
	};
	static unsigned char bytes[5000];
	ino_t folder = inode_named(kit_folder(DISK));
	unsigned int named[3], names = 0;
	struct pen_save *save;
	char index[300];

	tensors[0].memory = tensors[1].memory = bytes;
	options.shard_size = 5000;
	recording = true;
	OK(pen_save_start(kit_folder(DISK), tensors, 2, &options, &save, &kit_err));
	OK(pen_save_wait(save, NULL, &kit_err));
	recording = false;
	for (unsigned int i = 0; i < event_count; i++)
		if (is_naming(&events[i])) {
			CHECK(names < 3);
			named[names++] = i;
		}
	CHECK_EQ(names, 3);
	for (unsigned int i = 0; i < event_count; i++)
		if (events[i].kind == WRITE) {
			CHECK(i < named[0]);
			CHECK(flushed(i, named[0], events[i].inode));
		}
	snprintf(index, sizeof(index), "%s/model.safetensors.index.json", kit_folder(DISK));
	CHECK_EQ(events[named[2]].inode, inode_named(index));
	for (unsigned int i = 0; i < 3; i++)
		CHECK(flushed(named[i], i < 2 ? named[i + 1] : event_count, folder));
}

/* Of a checkpoint all is flushed before its name: what the first job wrote and the headers and the
 * tail of the second. */
TEST(power_lost_while_a_torch_file_is_saved_leaves_old_or_new)
{
	static const struct pen_torch_part pickle = { .name = "data.pkl", .bytes = "N.",
						      .length = 2 };
	struct pen_torch_content content = PEN_TORCH_CONTENT_INIT;
	struct pen_torch_storage storages[3] = { { .bytes = 5000 }, { .bytes = 0 },
						 { .bytes = 9 } };
	static unsigned char bytes[5000], covered[16 * 4096];
	ino_t folder = inode_named(kit_folder(DISK));
	unsigned int named = 0, names = 0;
	struct pen_torch_save *save;
	struct stat st;

	snprintf(target, sizeof(target), "%s/target", kit_folder(DISK));
	kit_write(target, 0, OLD_SIZE, OLD_BYTE);
	old_inode = inode_named(target);
	for (int i = 0; i < 3; i++)
		storages[i].memory = bytes;
	content.parts = &pickle;
	content.part_count = 1;
	content.storages = storages;
	content.storage_count = 3;
	recording = true;
	OK(pen_torch_save_start(target, NULL, &content, NULL, &save, &kit_err));
	OK(pen_torch_save_wait(save, NULL, &kit_err));
	recording = false;
	CHECK(!stat(target, &st) && st.st_ino != old_inode && st.st_size <= (off_t)sizeof(covered));
	for (unsigned int i = 0; i < event_count; i++)
		if (is_naming(&events[i])) {
			named = i;
			names++;
		}
	CHECK_EQ(names, 1);
	for (unsigned int i = 0; i < event_count; i++)
		if (events[i].kind == WRITE) {
			CHECK_EQ(events[i].inode, st.st_ino);
			CHECK(i < named && flushed(i, named, st.st_ino));
			memset(covered + events[i].offset, 1, events[i].length);
		}
	/* The log has every byte of the file. */
	for (off_t i = 0; i < st.st_size; i++)
		CHECK(covered[i]);
	CHECK(flushed(named, event_count, folder));
}

TEST_MAIN

/* SPDX-License-Identifier: MIT */
/*
 * Warming, with a machine that is made up as far as its disk's statistics and its memory go: the
 * file is a real one, in the real page cache.
 */
#include <dirent.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/sysmacros.h>
#include "engine/warm.h"
#include "io/object.h"
#include "scratch.h"
#include "sys/disk.h"
#include "sys/fault.h"
#include "sys/os.h"

#define MIB ((uint64_t)1 << 20)
#define SIZE (40 * MIB)
/* Long enough for anything that comes by itself, and short enough to wait for what must not. */
#define LONG 60.0
#define SHORT 0.5

static struct pen_error err;
static struct pen_device *device;
static struct pen_object *object;
static struct schedule *schedule;
static struct warm warm;
static void *memory;
static uint64_t bytes;
static char reason[PEN_REASON_MAX];

/* --------------------------------------------------------------------- the made-up machine -- */

static void put(const char *path, const char *text)
{
	char full[700], command[800];
	FILE *file;

	snprintf(full, sizeof(full), "%s", in_scratch(path));
	snprintf(command, sizeof(command), "mkdir -p \"$(dirname '%s')\"", full);
	CHECK(!system(command));
	file = fopen(full, "w");
	CHECK(file != NULL);
	fputs(text, file);
	CHECK(!fclose(file));
}

/* The disk that the scratch directory is on. */
static void disk_has(unsigned int requests, unsigned int sectors, unsigned int in_flight)
{
	char path[100], text[200];
	struct stat st;

	CHECK(!stat(in_scratch(""), &st));
	snprintf(path, sizeof(path), "sys/dev/block/%u:%u/device/vendor", major(st.st_dev),
		 minor(st.st_dev));
	put(path, "");
	snprintf(path, sizeof(path), "sys/dev/block/%u:%u/stat", major(st.st_dev),
		 minor(st.st_dev));
	snprintf(text, sizeof(text), "%u 1 %u 1 0 1 0 1 %u 1 1 0 0 0 0 0 0\n", requests, sectors,
		 in_flight);
	put(path, text);
}

static void memory_has(uint64_t mib)
{
	char text[64];

	snprintf(text, sizeof(text), "MemAvailable: %llu kB\n", (unsigned long long)mib << 10);
	put("proc/meminfo", text);
}

static uint64_t resident(void)
{
	uint64_t found;

	CHECK_EQ(object_residency(object, 0, SIZE, &found, &err), 0);
	return found;
}

/* Descriptors on files of these tests. Others come and go with each look at the machine. */
static unsigned int open_on_files(void)
{
	DIR *folder = opendir("/proc/self/fd");
	char target[700];
	unsigned int count = 0;

	CHECK(folder != NULL);
	for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
		ssize_t n = readlinkat(dirfd(folder), entry->d_name, target, sizeof(target) - 1);
		const char *inside;

		target[n < 0 ? 0 : n] = 0;
		inside = strstr(target, strrchr(scratch, '/'));
		count += inside && (strstr(inside, "/file") || strstr(inside, "/behind"));
	}
	closedir(folder);
	return count;
}

/* What is left to read, while the thread may be at it. */
static uint64_t left(void)
{
	uint64_t found;

	pthread_mutex_lock(&warm.lock);
	found = warm.left;
	pthread_mutex_unlock(&warm.lock);
	return found;
}

/* A cold file, and a schedule that has read it around the page cache. */
static void begin(void)
{
	struct pen_options given = PEN_OPTIONS_INIT, options;
	const char *path = make_file("file", SIZE);
	struct pen_extent extent = { .length = SIZE };

	disk_has(100, 1000, 0);
	memory_has(1000);
	CHECK_EQ(pen_device_open("host", &device, &err), 0);
	CHECK_EQ(pen_device_alloc(device, SIZE, &memory, &err), 0);
	CHECK_EQ(pen_object_open(path, PEN_READ, 0, &object, &err), 0);
	CHECK_EQ(os_uncache(object->fd), 0);
	if (!object->info.offset_align)
		SKIP("there is no direct I/O in TMPDIR");
	extent.object = object;
	extent.memory = memory;
	CHECK_EQ(schedule_options(&given, &options, &err), 0);
	CHECK_EQ(schedule_new(PEN_READ, device, &extent, NULL, 1, &options, &schedule, &err), 0);
	CHECK_EQ(schedule->work[AROUND].bytes, SIZE);
	CHECK_EQ(resident(), 0);
	warm_init(&warm, scratch);
}

static void end(void)
{
	schedule_free(schedule);
	pen_object_close(object);
	CHECK_EQ(pen_device_free(device, memory, SIZE, &err), 0);
	pen_device_close(device);
}

/* ----------------------------------------------------------------------------------- cases -- */

TEST(what_was_read_around_the_page_cache_is_in_it_afterwards)
{
	begin();
	warm_begin(&warm, schedule, true, &bytes, reason);
	CHECK_EQ(bytes, SIZE);
	CHECK(strstr(reason, "in the background"));
	CHECK_EQ(warm_wait(&warm, LONG), 0);
	CHECK_EQ(resident(), SIZE);
	CHECK(warm.brought >= SIZE && warm.brought < SIZE + MIB);
	CHECK_EQ(warm.left + warm.given_up, 0);
	end();
}

TEST(only_cold_bytes_are_read)
{
	char byte;

	begin();
	for (uint64_t at = 0; at < SIZE / 2; at += 4096)
		CHECK_EQ(os_pread(object->fd, &byte, 1, at), 1);
	warm_begin(&warm, schedule, true, &bytes, reason);
	CHECK_EQ(warm_wait(&warm, LONG), 0);
	CHECK_EQ(resident(), SIZE);
	CHECK(warm.brought < SIZE / 2 + MIB);
	end();
}

TEST(it_gives_way_to_others_at_the_disk)
{
	begin();
	disk_has(100, 1000, 1);
	warm_begin(&warm, schedule, true, &bytes, reason);
	CHECK_EQ(bytes, SIZE);
	CHECK_EQ(warm_wait(&warm, SHORT), -ETIMEDOUT);
	CHECK_EQ(resident(), 0);
	CHECK_EQ(left(), SIZE);
	/* They leave. */
	disk_has(200, 2000, 0);
	CHECK_EQ(warm_wait(&warm, LONG), 0);
	CHECK_EQ(resident(), SIZE);
	end();
}

TEST(who_asks_gets_it_from_a_disk_that_never_rests)
{
	begin();
	disk_has(100, 1000, 1);
	warm_begin(&warm, schedule, false, &bytes, reason);
	CHECK_EQ(warm_wait(&warm, LONG), 0);
	CHECK_EQ(resident(), SIZE);
	end();
}

TEST(what_others_moved_is_all_but_the_own)
{
	struct disk_counts before = { 10, 5 * MIB, 0 }, after = { 20, 13 * MIB, 0 };

	CHECK_EQ(disk_others(&before, &after, 6 * MIB), 2 * MIB);
	CHECK_EQ(disk_others(&before, &after, 8 * MIB), 0);
	CHECK_EQ(disk_others(&before, &after, 9 * MIB), 0);
}

TEST(statistics_are_those_of_the_whole_disk)
{
	struct disk_counts counts;
	struct disk disk;

	/* The kernel's links lead from the number to a partition's folder in its disk's. */
	put("sys/devices/sda/device/vendor", "");
	put("sys/devices/sda/stat", "5 0 16 0 2 0 8 0 3 0 0 0 0 0 0 4 0\n");
	put("sys/devices/sda/sda1/stat", "1 0 2 0 0 0 0 0 0 0 0\n");
	put("sys/devices/loop0/stat", "900 0 900 0 900 0 900 0 900 0 0\n");
	put("sys/dev/block/empty", "");
	put("sys/block/empty", "");
	CHECK(!symlink("../../devices/sda/sda1", in_scratch("sys/dev/block/8:1")));
	CHECK(!symlink("../../devices/loop0", in_scratch("sys/dev/block/7:0")));
	CHECK(!symlink("../devices/sda", in_scratch("sys/block/sda")));
	CHECK(!symlink("../devices/loop0", in_scratch("sys/block/loop0")));
	disk_of(scratch, makedev(8, 1), &disk);
	CHECK(!disk.all);
	CHECK_EQ(disk_look(&disk, &counts), 0);
	CHECK_EQ(counts.requests, 11);
	CHECK_EQ(counts.bytes, 24 * 512);
	CHECK_EQ(counts.in_flight, 3);
	/* What is no hardware, and what has no number there, may be on any disk. */
	disk_of(scratch, makedev(7, 0), &disk);
	CHECK(disk.all);
	CHECK_EQ(disk_look(&disk, &counts), 0);
	CHECK_EQ(counts.requests, 11);
	disk_of(scratch, makedev(0, 40), &disk);
	CHECK_EQ(disk_look(&disk, &counts), 0);
	CHECK_EQ(counts.bytes, 24 * 512);
	disk_of(in_scratch("nothing"), makedev(0, 40), &disk);
	CHECK_EQ(disk_look(&disk, &counts), -ENOENT);
}

TEST(unasked_it_is_done_only_where_memory_is_plentiful)
{
	begin();
	memory_has(79);
	warm_begin(&warm, schedule, true, &bytes, reason);
	CHECK_EQ(bytes, 0);
	CHECK(strstr(reason, "40 MiB do not fit into half of the 79 MiB"));
	CHECK_EQ(warm_wait(&warm, 0), 0);
	CHECK_EQ(resident(), 0);
	/* Who asks may fill it. */
	warm_begin(&warm, schedule, false, &bytes, reason);
	CHECK_EQ(bytes, SIZE);
	CHECK_EQ(warm_wait(&warm, LONG), 0);
	CHECK_EQ(resident(), SIZE);
	memory_has(39);
	warm_begin(&warm, schedule, false, &bytes, reason);
	CHECK_EQ(bytes, 0);
	CHECK(strstr(reason, "do not fit into the 39 MiB"));
	end();
}

TEST(it_ends_when_memory_gets_short)
{
	begin();
	disk_has(100, 1000, 1);
	warm_begin(&warm, schedule, true, &bytes, reason);
	CHECK_EQ(bytes, SIZE);
	memory_has(79);
	disk_has(100, 1000, 0);
	CHECK_EQ(warm_wait(&warm, LONG), 0);
	CHECK_EQ(resident(), 0);
	CHECK_EQ(warm.given_up, SIZE);
	CHECK(strstr(warm.reason, "memory got short"));
	end();
}

/* A second file, behind the first at a disk that never rests. */
static struct pen_object *behind;

static void begin_with_two(void)
{
	struct pen_options given = PEN_OPTIONS_INIT, options;
	struct pen_extent extent = { .length = SIZE };
	struct schedule *other;

	begin();
	CHECK_EQ(pen_object_open(make_file("behind", SIZE), PEN_READ, 0, &behind, &err), 0);
	CHECK_EQ(os_uncache(behind->fd), 0);
	extent.object = behind;
	extent.memory = memory;
	CHECK_EQ(schedule_options(&given, &options, &err), 0);
	CHECK_EQ(schedule_new(PEN_READ, device, &extent, NULL, 1, &options, &other, &err), 0);
	disk_has(100, 1000, 1);
	warm_begin(&warm, schedule, true, &bytes, reason);
	warm_begin(&warm, other, true, &bytes, reason);
	CHECK_EQ(left(), 2 * SIZE);
	schedule_free(other);
}

static void end_with_two(void)
{
	warm_stop(&warm);
	CHECK_EQ(warm_wait(&warm, LONG), 0);
	pen_object_close(behind);
	end();
}

/* Not that what waits should then be found to fit. */
TEST(when_memory_gets_short_the_files_that_wait_are_given_up_too)
{
	begin_with_two();
	memory_has(100);
	disk_has(100, 1000, 0);
	CHECK_EQ(warm_wait(&warm, LONG), 0);
	CHECK_EQ(warm.given_up, 2 * SIZE);
	CHECK_EQ(warm.brought, 0);
	CHECK(strstr(warm.reason, "memory got short: 100 MiB"));
	end_with_two();
}

/* Begun while the disk is busy; by the time that it rests, something has happened to the file. */
static void check_let_go(void (*change)(const char *path))
{
	begin();
	disk_has(100, 1000, 1);
	warm_begin(&warm, schedule, true, &bytes, reason);
	CHECK_EQ(bytes, SIZE);
	change(in_scratch("file"));
	disk_has(100, 1000, 0);
	CHECK_EQ(warm_wait(&warm, LONG), 0);
	CHECK_EQ(warm.brought, 0);
	CHECK_EQ(warm.given_up, SIZE);
	CHECK(strstr(warm.reason, "removed, replaced or written to"));
	end();
}

static void replace(const char *path)
{
	CHECK(!rename(make_file("other", SIZE), path));
}

static void write_to(const char *path)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);

	CHECK(fd >= 0);
	CHECK_EQ(pwrite(fd, "x", 1, 0), 1);
	close(fd);
}

static void cut_short(const char *path)
{
	CHECK(!truncate(path, 4096));
}

static void take_away(const char *path)
{
	CHECK(!unlink(path));
}

TEST(a_file_that_was_replaced_is_let_go_of)
{
	check_let_go(replace);
}

TEST(a_file_that_was_written_to_is_let_go_of)
{
	check_let_go(write_to);
}

TEST(a_file_that_was_cut_short_is_let_go_of)
{
	check_let_go(cut_short);
}

TEST(a_file_that_was_removed_is_let_go_of)
{
	check_let_go(take_away);
}

TEST(what_is_stopped_stays_cold_and_leaves_no_descriptor)
{
	unsigned int before;

	begin();
	before = open_on_files();
	disk_has(100, 1000, 1);
	warm_begin(&warm, schedule, true, &bytes, reason);
	warm_stop(&warm);
	CHECK_EQ(left(), 0);
	CHECK_EQ(warm_wait(&warm, LONG), 0);
	CHECK_EQ(warm.given_up, SIZE);
	CHECK(strstr(warm.reason, "stopped"));
	CHECK_EQ(resident(), 0);
	CHECK_EQ(open_on_files(), before);
	end();
}

TEST(the_same_bytes_are_not_waited_for_twice)
{
	begin();
	disk_has(100, 1000, 1);
	warm_begin(&warm, schedule, true, &bytes, reason);
	warm_begin(&warm, schedule, true, &bytes, reason);
	CHECK_EQ(bytes, SIZE);
	CHECK_EQ(left(), SIZE);
	warm_drop(&warm, object);
	CHECK_EQ(warm_wait(&warm, 0), 0);
	CHECK_EQ(warm.given_up, SIZE);
	end();
}

TEST(dropping_a_file_does_not_wait_for_those_before_it)
{
	begin_with_two();
	alarm((unsigned int)LONG);
	warm_drop(&warm, behind);
	alarm(0);
	CHECK_EQ(left(), SIZE);
	CHECK_EQ(warm.given_up, SIZE);
	end_with_two();
}

TEST(removed_files_are_let_go_of_though_the_disk_never_rests)
{
	unsigned int before;

	begin_with_two();
	before = open_on_files();
	CHECK(before > 2);
	take_away(in_scratch("behind"));
	for (int i = 0; i < 600 && open_on_files() == before; i++)
		os_sleep(100000000);
	CHECK_EQ(open_on_files(), before - 1);
	CHECK_EQ(left(), SIZE);
	take_away(in_scratch("file"));
	CHECK_EQ(warm_wait(&warm, LONG), 0);
	CHECK_EQ(warm.given_up, 2 * SIZE);
	end_with_two();
}

/* ------------------------------------------------------------------------- many files -- */

#define FILES 20

static unsigned int duplicated;

static int count_duplicates(const char *name)
{
	duplicated += !strcmp(name, "fcntl");
	return 0;
}

TEST(no_more_descriptors_are_taken_than_a_part_of_the_processs)
{
	struct pen_options given = PEN_OPTIONS_INIT, options;
	struct pen_extent extents[FILES];
	struct schedule *many;
	struct rlimit limit, few;
	char name[20];

	begin();
	disk_has(100, 1000, 1);
	for (unsigned int i = 0; i < FILES; i++) {
		snprintf(name, sizeof(name), "many-%u", i);
		extents[i] = (struct pen_extent){ .memory = memory, .length = 65536 };
		CHECK_EQ(pen_object_open(make_file(name, 65536), PEN_READ, 0, &extents[i].object,
					 &err), 0);
		CHECK_EQ(os_uncache(extents[i].object->fd), 0);
	}
	CHECK_EQ(schedule_options(&given, &options, &err), 0);
	CHECK_EQ(schedule_new(PEN_READ, device, extents, NULL, FILES, &options, &many, &err), 0);
	CHECK_EQ(many->work[AROUND].bytes, FILES * 65536);
	CHECK(!getrlimit(RLIMIT_NOFILE, &limit));
	few = limit;
	few.rlim_cur = 4 * (FILES - 1);
	CHECK(!setrlimit(RLIMIT_NOFILE, &few));
	sys_fault_hook = count_duplicates;
	warm_begin(&warm, many, true, &bytes, reason);
	CHECK_EQ(bytes, 0);
	CHECK(strstr(reason, "more files would wait"));
	CHECK_EQ(duplicated, 0);
	CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
	/* The second time they are the same files, and it is as if they had been asked for once. */
	for (int i = 0; i < 2; i++) {
		warm_begin(&warm, many, true, &bytes, reason);
		CHECK_EQ(bytes, FILES * 65536);
		CHECK_EQ(left(), FILES * 65536);
	}
	/* One more has no place. */
	few.rlim_cur = 4 * FILES;
	CHECK(!setrlimit(RLIMIT_NOFILE, &few));
	warm_begin(&warm, schedule, true, &bytes, reason);
	CHECK_EQ(bytes, 0);
	sys_fault_hook = NULL;
	warm_stop(&warm);
	CHECK_EQ(warm_wait(&warm, LONG), 0);
	CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
	schedule_free(many);
	for (unsigned int i = 0; i < FILES; i++)
		pen_object_close(extents[i].object);
	end();
}

/* ------------------------------------------------------------- beside a program at its end -- */

static int waited = -1;

/* What is flushed holds the lock that every fopen() and fclose() of the process wants. */
static ssize_t wait_while_flushed(void *cookie, const char *text, size_t length)
{
	(void)cookie;
	(void)text;
	warm_begin(&warm, schedule, true, &bytes, reason);
	waited = warm_wait(&warm, LONG);
	return (ssize_t)length;
}

TEST(it_needs_no_lock_that_exit_holds)
{
	cookie_io_functions_t functions = { .write = wait_while_flushed };
	FILE *stream;

	begin();
	stream = fopencookie(NULL, "w", functions);
	CHECK(stream != NULL && fputc('x', stream) == 'x');
	CHECK(!fflush(NULL));
	CHECK_EQ(waited, 0);
	CHECK_EQ(resident(), SIZE);
	CHECK(!fclose(stream));
	end();
}

/* Signals that the thread with this number blocks, as a mask. */
static unsigned long long blocked_by(const char *thread)
{
	char path[300], line[200];
	unsigned long long mask = 0;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/self/task/%s/status", thread);
	file = fopen(path, "r");
	CHECK(file != NULL);
	while (fgets(line, sizeof(line), file))
		sscanf(line, "SigBlk: %llx", &mask);
	CHECK(!fclose(file));
	return mask;
}

TEST(no_signal_of_the_program_is_for_it)
{
	char own[20], other[20] = "";
	struct dirent *entry;
	DIR *threads;

	begin();
	disk_has(100, 1000, 1);
	warm_begin(&warm, schedule, true, &bytes, reason);
	snprintf(own, sizeof(own), "%d", (int)getpid());
	threads = opendir("/proc/self/task");
	CHECK(threads != NULL);
	while ((entry = readdir(threads)))
		if (entry->d_name[0] != '.' && strcmp(entry->d_name, own))
			snprintf(other, sizeof(other), "%.19s", entry->d_name);
	closedir(threads);
	CHECK(blocked_by(other) & 1ull << (SIGINT - 1));
	CHECK(blocked_by(other) & 1ull << (SIGTERM - 1));
	CHECK_EQ(blocked_by(own), 0);
	warm_stop(&warm);
	CHECK_EQ(warm_wait(&warm, LONG), 0);
	end();
}

/* ------------------------------------------------------------------------------ what fails -- */

static atomic_uint asked;

static int old_kernel(const char *name)
{
	asked += !strcmp(name, "fadvise");
	return !strcmp(name, "populate") ? EINVAL : 0;
}

/* There the kernel reads ahead as it is told, which it does only so far at a time. */
TEST(an_old_kernel_is_asked_in_small_steps)
{
	begin();
	sys_fault_hook = old_kernel;
	warm_begin(&warm, schedule, true, &bytes, reason);
	CHECK_EQ(warm_wait(&warm, LONG), 0);
	sys_fault_hook = NULL;
	CHECK_EQ(asked, SIZE / (128 << 10));
	for (int i = 0; i < 600 && resident() < SIZE; i++)
		os_sleep(100000000);
	CHECK_EQ(resident(), SIZE);
	end();
}

static int fail_fetch(const char *name)
{
	return !strcmp(name, "fetch") ? EIO : 0;
}

static int fail_thread(const char *name)
{
	return !strcmp(name, "pthread_create") ? EAGAIN : 0;
}

TEST(bytes_that_cannot_be_read_are_given_up)
{
	begin();
	sys_fault_hook = fail_fetch;
	warm_begin(&warm, schedule, true, &bytes, reason);
	CHECK_EQ(warm_wait(&warm, LONG), 0);
	sys_fault_hook = NULL;
	CHECK_EQ(warm.given_up, SIZE);
	CHECK(strstr(warm.reason, "cannot be read"));
	end();
}

TEST(without_a_thread_nothing_is_promised)
{
	unsigned int before;

	begin();
	before = open_on_files();
	sys_fault_hook = fail_thread;
	warm_begin(&warm, schedule, true, &bytes, reason);
	sys_fault_hook = NULL;
	CHECK_EQ(bytes, 0);
	CHECK(strstr(reason, "no thread"));
	CHECK_EQ(warm_wait(&warm, 0), 0);
	CHECK_EQ(open_on_files(), before);
	end();
}

/* --------------------------------------------------------------------------- by the header -- */

static struct pen_warming warming = PEN_WARMING_INIT;

static void transfer(int cache, struct pen_report *report)
{
	struct pen_extent extent = { .object = object, .memory = memory, .length = SIZE };
	struct pen_options options = PEN_OPTIONS_INIT;

	options.cache = cache;
	CHECK_EQ(pen_transfer(PEN_READ, device, &extent, 1, &options, report, &err), 0);
	CHECK_EQ(pattern_check(memory, SIZE, 0), SIZE);
}

TEST(a_job_warms_what_it_read_where_it_is_asked_to)
{
	struct pen_report report = PEN_REPORT_INIT;

	begin();
	transfer(PEN_CACHE_AUTO, &report);
	CHECK_EQ(report.warming_bytes, 0);
	CHECK(strstr(report.cache_reason, "around the page cache"));
	CHECK_EQ(resident(), 0);
	transfer(PEN_CACHE_AFTER, &report);
	CHECK_EQ(report.warming_bytes, SIZE);
	CHECK_EQ(pen_warming_wait(LONG), 0);
	CHECK_EQ(resident(), SIZE);
	pen_warming_poll(&warming);
	CHECK(warming.brought >= SIZE && warming.brought < SIZE + MIB);
	CHECK_EQ(warming.left, 0);
	CHECK_EQ(warming.given_up, 0);
	/* It is there now: nothing goes around the cache any more. */
	transfer(PEN_CACHE_AFTER, &report);
	CHECK_EQ(report.warming_bytes, 0);
	CHECK_TEXT(report.cache_reason, "");
	end();
}

TEST(dropping_a_file_ends_its_warming)
{
	struct pen_report report = PEN_REPORT_INIT;

	begin();
	transfer(PEN_CACHE_AFTER, &report);
	transfer(PEN_CACHE_DROP, &report);
	CHECK_EQ(pen_warming_wait(0), 0);
	CHECK_EQ(resident(), 0);
	end();
}

/* A thread that is not there, and descriptors that are somebody else's. */
TEST(a_forked_child_has_nothing_of_it)
{
	struct pen_report report = PEN_REPORT_INIT;
	unsigned int before;
	int status = -1;
	pid_t pid;

	begin();
	before = open_on_files();
	transfer(PEN_CACHE_AFTER, &report);
	pid = fork();
	if (!pid) {
		alarm(30);
		pen_warming_poll(&warming);
		CHECK_EQ(warming.left + warming.brought + warming.given_up, 0);
		CHECK_EQ(pen_warming_wait(0), 0);
		CHECK_EQ(open_on_files(), before);
		CHECK_EQ(os_uncache(object->fd), 0);
		exit(0);
	}
	CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
	CHECK(WIFEXITED(status) && !WEXITSTATUS(status));
	pen_warming_stop();
	CHECK_EQ(pen_warming_wait(LONG), 0);
	end();
}

TEST(words_of_people_are_policies)
{
	int cache;

	unsetenv("PENSTOCK_CACHE");
	CHECK_EQ(pen_cache_parse(NULL, &cache, &err), 0);
	CHECK_EQ(cache, PEN_CACHE_AFTER_UNASKED);
	CHECK_EQ(pen_cache_parse("off", &cache, &err), 0);
	CHECK_EQ(cache, PEN_CACHE_AUTO);
	CHECK_EQ(pen_cache_parse("keep", &cache, &err), 0);
	CHECK_EQ(cache, PEN_CACHE_KEEP);
	CHECK_EQ(pen_cache_parse("drop", &cache, &err), 0);
	CHECK_EQ(cache, PEN_CACHE_DROP);
	setenv("PENSTOCK_CACHE", "after", 1);
	CHECK_EQ(pen_cache_parse("auto", &cache, &err), 0);
	CHECK_EQ(cache, PEN_CACHE_AFTER_UNASKED);
	CHECK_EQ(pen_cache_parse(NULL, &cache, &err), 0);
	CHECK_EQ(cache, PEN_CACHE_AFTER);
	setenv("PENSTOCK_CACHE", "sometimes", 1);
	CHECK_EQ(pen_cache_parse(NULL, &cache, &err), -EINVAL);
	CHECK(strstr(err.message, "PENSTOCK_CACHE") && strstr(err.hint, "keep"));
	CHECK_TEXT(err.object, "sometimes");
	CHECK_EQ(pen_cache_parse("KEEP", &cache, &err), -EINVAL);
	CHECK(!strstr(err.message, "PENSTOCK_CACHE"));
}

TEST_MAIN

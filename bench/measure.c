/* SPDX-License-Identifier: MIT */
/* Clocks, medians, cold and warm files; see measure.h. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "base/pattern.h"
#include "base/text.h"
#include "measure.h"

double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

double cpu_now(void)
{
	struct rusage use;

	getrusage(RUSAGE_SELF, &use);
	return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
	       (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec) / 1e6;
}

double gb_per_s(uint64_t bytes, double seconds)
{
	return seconds > 0 ? (double)bytes / seconds / 1e9 : 0;
}

/* ----------------------------------------------------------------------------- series -- */

#define SERIES_MAX 256
#define VALUES_MAX 512
#define PAGE 4096

static struct series {
	char name[48];
	int count;
	double values[VALUES_MAX];
} series[SERIES_MAX];
static int series_count;

static struct series *find(const char *name)
{
	for (int i = 0; i < series_count; i++)
		if (!strcmp(series[i].name, name))
			return &series[i];
	return NULL;
}

void record(const char *name, double value)
{
	struct series *found = find(name);

	if (!found) {
		if (series_count == SERIES_MAX)
			die("more than %d series", SERIES_MAX);
		found = &series[series_count++];
		text_copy(found->name, sizeof(found->name), name);
	}
	if (found->count < VALUES_MAX)
		found->values[found->count++] = value;
}

int recorded(const char *name)
{
	struct series *found = find(name);

	return found ? found->count : 0;
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

double median(const double *values, int count)
{
	double sorted[VALUES_MAX];

	if (!count)
		return NAN;
	if (count > VALUES_MAX)
		count = VALUES_MAX;
	memcpy(sorted, values, (size_t)count * sizeof(sorted[0]));
	qsort(sorted, (size_t)count, sizeof(sorted[0]), compare);
	return count % 2 ? sorted[count / 2] : (sorted[count / 2 - 1] + sorted[count / 2]) / 2;
}

double median_of(const char *name)
{
	struct series *found = find(name);

	return found ? median(found->values, found->count) : NAN;
}

double first_of(const char *name)
{
	struct series *found = find(name);

	return found ? found->values[0] : NAN;
}

double most_of(const char *name)
{
	struct series *found = find(name);
	double most = NAN;

	for (int i = 0; found && i < found->count; i++)
		if (!(found->values[i] <= most))
			most = found->values[i];
	return most;
}

void record_json(FILE *file)
{
	fputs("{", file);
	for (int i = 0; i < series_count; i++) {
		fprintf(file, "%s\n  \"%s\": {\"median\": %.9g, \"values\": [", i ? "," : "",
			series[i].name, median(series[i].values, series[i].count));
		for (int v = 0; v < series[i].count; v++)
			fprintf(file, "%s%.9g", v ? ", " : "", series[i].values[v]);
		fputs("]}", file);
	}
	fputs("\n}", file);
}

/* ------------------------------------------------------------------------------ words -- */

void die(const char *format, ...)
{
	va_list args;

	fflush(stdout);
	fprintf(stderr, "%s: ", program_invocation_short_name);
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	exit(1);
}

void check(int rc, const struct pen_error *err)
{
	char text[1024];

	if (!rc)
		return;
	pen_error_format(err, text, sizeof(text));
	die("%s", text);
}

const char *size_text(uint64_t bytes)
{
	static char texts[8][TEXT_SIZE_MAX];
	static int turn;

	turn = (turn + 1) % 8;
	return text_from_size(bytes, texts[turn], sizeof(texts[turn]));
}

/* ----------------------------------------------------------------------- cold and warm -- */

void make_range_cold(int fd, uint64_t offset, uint64_t length)
{
	/* Pages that are still dirty stay: flush first. */
	fdatasync(fd);
	posix_fadvise(fd, (off_t)offset, (off_t)length, POSIX_FADV_DONTNEED);
}

const char *make_cold(int fd)
{
	int control;
	bool dropped = false;

	make_range_cold(fd, 0, 0);
	control = open("/proc/sys/vm/drop_caches", O_WRONLY);
	if (control >= 0) {
		sync();
		dropped = write(control, "3", 1) == 1;
		close(control);
	}
	return dropped ? "drop_caches" : "posix_fadvise";
}

struct warmer {
	pthread_t thread;
	int fd;
	uint64_t offset, end;
};

static void *warm(void *argument)
{
	struct warmer *part = argument;
	static const size_t step = 4 << 20;
	void *buffer = malloc(step);

	while (buffer && part->offset < part->end) {
		ssize_t got = pread(part->fd, buffer, step, (off_t)part->offset);

		if (got <= 0)
			break;
		part->offset += (uint64_t)got;
	}
	free(buffer);
	return NULL;
}

void make_warm(int fd, uint64_t size)
{
	struct warmer parts[4];

	for (uint64_t i = 0; i < 4; i++) {
		parts[i] = (struct warmer){ .fd = fd, .offset = size / 4 * i,
					    .end = i == 3 ? size : size / 4 * (i + 1) };
		if (pthread_create(&parts[i].thread, NULL, warm, &parts[i]))
			die("a thread could not be started");
	}
	for (int i = 0; i < 4; i++)
		pthread_join(parts[i].thread, NULL);
}

#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif

static uint64_t cached_by_mincore(int fd, uint64_t size)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = (size + page - 1) / page;
	unsigned char *flags = malloc(pages);
	void *map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
	uint64_t count = 0;

	if (flags && map != MAP_FAILED && !mincore(map, size, flags))
		for (size_t i = 0; i < pages; i++)
			count += flags[i] & 1;
	if (map != MAP_FAILED)
		munmap(map, size);
	free(flags);
	return count * page;
}

uint64_t cached_bytes(int fd, uint64_t size)
{
	uint64_t range[2] = { 0, size };
	uint64_t counts[5] = { 0 };	/* cached, dirty, writeback, evicted, recently evicted */

	if (syscall(SYS_cachestat, fd, range, counts, 0))
		return cached_by_mincore(fd, size);
	return counts[0] * (uint64_t)sysconf(_SC_PAGESIZE);
}

int open_direct(const char *path)
{
	int fd = open(path, O_RDONLY | O_DIRECT);

	if (fd < 0 && errno == EINVAL)
		fd = open(path, O_RDONLY);
	if (fd < 0)
		die("%s: %s", path, strerror(errno));
	return fd;
}

void need_room(const char *path, uint64_t size)
{
	struct statvfs disk;
	uint64_t room;

	if (statvfs(path, &disk))
		die("%s: %s", path, strerror(errno));
	room = (uint64_t)disk.f_bavail * disk.f_frsize;
	if (room < size)
		die("%s has %s free, but %s are needed", path, size_text(room), size_text(size));
}

/* --------------------------------------------------------------------------- checking -- */

static uint64_t sample(uint64_t index, uint64_t size)
{
	uint64_t at = index * MIB + index * 7919 % 256 * PAGE;

	return at + PAGE > size ? size - PAGE : at;
}

void check_memory(struct pen_device *device, const void *memory, uint64_t size, const char *what)
{
	unsigned char page[PAGE];
	struct pen_error err;

	for (uint64_t i = 0; i <= size / MIB; i++) {
		uint64_t at = sample(i, size);
		size_t right;

		check(pen_device_get(device, page, (const char *)memory + at, PAGE, &err), &err);
		right = pattern_check(page, PAGE, at);
		if (right != PAGE)
			die("WRONG BYTES in memory at %llu after %s",
			    (unsigned long long)(at + right), what);
	}
}

void check_file(const char *path, uint64_t size, const char *what)
{
	unsigned char page[PAGE];
	int fd = open(path, O_RDONLY);

	if (fd < 0)
		die("%s: %s", path, strerror(errno));
	make_range_cold(fd, 0, 0);
	posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
	for (uint64_t i = 0; i <= size / MIB; i++) {
		uint64_t at = sample(i, size);

		if (pread(fd, page, PAGE, (off_t)at) != PAGE ||
		    pattern_check(page, PAGE, at) != PAGE)
			die("WRONG BYTES in %s at %llu after %s", path, (unsigned long long)at,
			    what);
	}
	make_range_cold(fd, 0, 0);
	close(fd);
}

/* ----------------------------------------------------------------------------- memory -- */

uint64_t anonymous_memory(void)
{
	char line[128];
	unsigned long long kib = 0;
	FILE *status = fopen("/proc/self/status", "r");

	while (status && fgets(line, sizeof(line), status))
		if (sscanf(line, "RssAnon: %llu", &kib) == 1)
			break;
	if (status)
		fclose(status);
	return kib << 10;
}

static pthread_t watcher;
static atomic_bool watching;
static uint64_t most_memory;	/* the watcher's, until it is joined */

static void *watch_memory(void *argument)
{
	while (atomic_load(&watching)) {
		uint64_t memory = anonymous_memory();

		if (memory > most_memory)
			most_memory = memory;
		usleep(1000);
	}
	return argument;
}

void memory_watch_start(void)
{
	most_memory = 0;
	atomic_store(&watching, true);
	if (pthread_create(&watcher, NULL, watch_memory, NULL))
		die("a thread could not be started");
}

uint64_t memory_watch_stop(void)
{
	atomic_store(&watching, false);
	pthread_join(watcher, NULL);
	return most_memory;
}

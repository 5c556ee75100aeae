/* SPDX-License-Identifier: MIT */
/* Bringing bytes into the page cache after a job; see warm.h. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "base/text.h"
#include "engine/warm.h"
#include "io/object.h"
#include "sys/disk.h"
#include "sys/memory.h"
#include "sys/os.h"

/* What is read at a time, and between two looks at a disk that rests. */
#define PIECE ((uint64_t)4 << 20)
#define BURST ((uint64_t)16 << 20)
/* Files that wait at the same time, each with a descriptor: so many, and no more than this part of
 * those that the process may have. */
#define FILES_MAX 256u
#define FILES_PART 4u
/* Holes up to this are read, too: a huge page is no smaller. */
#define HOLE ((uint64_t)2 << 20)

/*
 * Others are at the disk if they moved as much as one piece during a burst, or if anything happens
 * in the moment after it; the kernel's own read-ahead has some time to end before. Then the disk
 * has to rest for a while: longer each time that it does not, up to a second. So has it at first.
 * One that never rests gets a burst after each such second if somebody asked for it, else none.
 */
#define SETTLE_NS 1000000ull
#define MOMENT_NS 2000000ull
#define WHILE_NS 25000000ull
#define LONGEST_NS 1000000000ull
/* In a rest there is no more than one request in so long a time, and few bytes: some programs never
 * quite stop to write. */
#define REQUEST_NS 10000000ull
#define REST_BYTES ((uint64_t)256 << 10)

#define CHANGED "the file was removed, replaced or written to"

struct warm_range {
	uint64_t offset, length;
};

struct warm_file {
	struct warm_file *next;
	int fd;				/* our own */
	struct stat as_it_was;		/* when it was read */
	struct disk disk;
	bool unasked;
	bool dropped;
	uint64_t left;			/* bytes that were not looked at yet */
	struct warm_range now;		/* the rest of the range that is being read; the thread's */
	struct warm_range *ranges;	/* those from `at` on are to be read */
	size_t at, count;
};

struct warm warm_process;

static void news_init(pthread_cond_t *news)
{
	pthread_condattr_t clock;

	pthread_condattr_init(&clock);
	pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
	pthread_cond_init(news, &clock);
	pthread_condattr_destroy(&clock);
}

void warm_init(struct warm *warm, const char *root)
{
	*warm = (struct warm){ .root = root };
	pthread_mutex_init(&warm->lock, NULL);
	news_init(&warm->news);
}

static void file_free(struct warm_file *file)
{
	if (file->fd >= 0)
		os_close(file->fd);
	free(file->ranges);
	free(file);
}

static void free_all(struct warm_file *file)
{
	while (file) {
		struct warm_file *next = file->next;

		file_free(file);
		file = next;
	}
}

/* In a forked child, with the lock held. */
static void forget_parents(void)
{
	struct warm *warm = &warm_process;

	free_all(warm->first);
	warm->first = NULL;
	warm->running = false;
	warm->left = warm->brought = warm->given_up = 0;
	warm->reason[0] = 0;
	news_init(&warm->news);		/* others may have waited for the parent's */
}

__attribute__((constructor)) static void begin_process(void)
{
	warm_init(&warm_process, "");
	os_at_fork(OS_FORK_WARM, &warm_process.lock, forget_parents);
}

/* What is left of a file will not be brought in. */
__attribute__((format(printf, 3, 4)))
static void give_up_locked(struct warm *warm, struct warm_file *file, const char *format, ...)
{
	va_list args;

	file->dropped = true;
	if (!file->left)
		return;
	warm->left -= file->left;
	warm->given_up += file->left;
	file->left = 0;
	va_start(args, format);
	vsnprintf(warm->reason, sizeof(warm->reason), format, args);
	va_end(args);
}

/* ------------------------------------------------------------------------------ the thread -- */

/* Sleep, unless the file is dropped meanwhile; is it? */
static bool rest(struct warm *warm, struct warm_file *file, uint64_t ns)
{
	struct timespec until = os_from_now((double)ns / 1e9);
	bool dropped;

	pthread_mutex_lock(&warm->lock);
	while (!file->dropped && !pthread_cond_timedwait(&warm->news, &warm->lock, &until))
		;
	dropped = file->dropped;
	pthread_mutex_unlock(&warm->lock);
	return dropped;
}

/* Did nobody want the disk for so long? Where nothing tells, nobody is known to. */
static bool was_quiet(struct warm *warm, struct warm_file *file, uint64_t ns)
{
	struct disk_counts before, after;

	if (disk_look(&file->disk, &before))
		return true;
	if (rest(warm, file, ns) || disk_look(&file->disk, &after))
		return true;
	return !after.in_flight && after.requests - before.requests <= ns / REQUEST_NS &&
	       disk_others(&before, &after, 0) <= REST_BYTES;
}

static bool same_time(struct timespec a, struct timespec b)
{
	return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

static bool is_as_it_was(const struct warm_file *file)
{
	struct stat now;

	return !os_fstat(file->fd, &now) && now.st_nlink &&
	       now.st_size == file->as_it_was.st_size &&
	       same_time(now.st_mtim, file->as_it_was.st_mtim);
}

static bool fits(uint64_t bytes, uint64_t available, bool unasked)
{
	return bytes <= (unasked ? available / 2 : available);
}

/* Files that wait behind the first go now if they were dropped or are not as they were: the space
 * of a removed file must not wait for its turn. */
static void clear_queue(struct warm *warm)
{
	struct warm_file **link, *file;

	pthread_mutex_lock(&warm->lock);
	link = &warm->first->next;
	while ((file = *link)) {
		bool current;

		/* Others only add to the end meanwhile. */
		pthread_mutex_unlock(&warm->lock);
		current = is_as_it_was(file);
		pthread_mutex_lock(&warm->lock);
		if (!current)
			give_up_locked(warm, file, CHANGED);
		if (file->left) {
			link = &file->next;
			continue;
		}
		*link = file->next;
		file_free(file);
	}
	pthread_mutex_unlock(&warm->lock);
}

/* Where memory got short all is given up: what the first file leaves is not for those that wait. */
static void give_up_short_locked(struct warm *warm, uint64_t available)
{
	uint64_t left = warm->left;

	for (struct warm_file *file = warm->first; file; file = file->next)
		if (!fits(left, available, file->unasked))
			give_up_locked(warm, file, "memory got short: %llu MiB are available",
				       (unsigned long long)available >> 20);
}

/* May it be gone on with? If not, what is left of the file is given up. */
static bool may_go_on(struct warm *warm, struct warm_file *file)
{
	uint64_t available = memory_available(warm->root);
	bool current = is_as_it_was(file);

	clear_queue(warm);
	pthread_mutex_lock(&warm->lock);
	if (!current)
		give_up_locked(warm, file, CHANGED);
	give_up_short_locked(warm, available);
	current = !file->dropped;
	pthread_mutex_unlock(&warm->lock);
	return current;
}

/* Until the disk has a rest, or the file is given up. */
static void give_way(struct warm *warm, struct warm_file *file, bool busy)
{
	uint64_t ns = WHILE_NS;

	if (!busy && !rest(warm, file, SETTLE_NS) && was_quiet(warm, file, MOMENT_NS))
		return;
	/* A disk may never rest: what ends the reading ends the waiting, too. */
	while (!was_quiet(warm, file, ns) && may_go_on(warm, file) &&
	       (file->unasked || ns < LONGEST_NS))
		ns = 2 * ns < LONGEST_NS ? 2 * ns : LONGEST_NS;
}

/* The next piece into the page cache, and on. `own` is what had to come from the disk: of a piece
 * that is there nothing, and of any other more, since the kernel reads ahead. */
static int read_piece(struct warm_file *file, uint64_t *length, uint64_t *own)
{
	struct warm_range *now = &file->now;
	uint64_t before = os_thread_read();
	int rc;

	/* Pieces end where huge pages do. */
	*length = PIECE - now->offset % PIECE;
	if (*length > now->length)
		*length = now->length;
	rc = os_fetch(file->fd, now->offset, *length);
	now->offset += *length;
	now->length -= *length;
	*own = os_thread_read() - before;
	return rc;
}

static void next_range(struct warm *warm, struct warm_file *file)
{
	pthread_mutex_lock(&warm->lock);
	file->now = file->ranges[file->at++];
	pthread_mutex_unlock(&warm->lock);
}

/* Read for a while; true if others came to the disk. */
static bool read_burst(struct warm *warm, struct warm_file *file)
{
	struct disk_counts before, after;
	bool seen = !disk_look(&file->disk, &before), others = false, over = false;
	uint64_t all = 0, own, length;
	char words[128];

	while (all < BURST && !others && !over) {
		int rc;

		if (!file->now.length)
			next_range(warm, file);
		rc = read_piece(file, &length, &own);

		all += own;
		pthread_mutex_lock(&warm->lock);
		if (rc)
			give_up_locked(warm, file, "it cannot be read: %s",
				       strerror_r(-rc, words, sizeof(words)));
		if (!file->dropped) {
			warm->left -= length;
			file->left -= length;
			warm->brought += own;
		}
		over = file->dropped || !file->left;
		pthread_mutex_unlock(&warm->lock);
		if (seen && !disk_look(&file->disk, &after))
			others = disk_others(&before, &after, all) >= PIECE;
	}
	return others;
}

static void *warm_run(void *argument)
{
	struct warm *warm = argument;
	struct warm_file *file;
	bool busy = true;	/* until it has been looked at */

	os_stand_back();
	pthread_mutex_lock(&warm->lock);
	while ((file = warm->first)) {
		while (file->left) {
			pthread_mutex_unlock(&warm->lock);
			give_way(warm, file, busy);
			busy = may_go_on(warm, file) && read_burst(warm, file);
			pthread_mutex_lock(&warm->lock);
		}
		warm->first = file->next;
		file_free(file);
		pthread_cond_broadcast(&warm->news);
	}
	warm->running = false;
	pthread_cond_broadcast(&warm->news);
	pthread_mutex_unlock(&warm->lock);
	return NULL;
}

/* --------------------------------------------------------------------- what is to be read -- */

/* The ranges of the requests [*next, end) of the list around the cache. */
static void add_ranges(struct warm_file *file, const struct schedule *schedule, size_t *next,
		       size_t end)
{
	for (; *next < end; ++*next) {
		uint32_t number = schedule->work[AROUND].requests[*next];
		const struct plan_request *request = &schedule->plan->requests[number];
		struct warm_range *last = file->count ? &file->ranges[file->count - 1] : NULL;

		if (!last || request->offset > last->offset + last->length + HOLE)
			file->ranges[file->count++] =
				(struct warm_range){ request->offset, request->length };
		else if (request->offset + request->length > last->offset + last->length)
			last->length = request->offset + request->length - last->offset;
	}
	for (size_t i = 0; i < file->count; i++)
		file->left += file->ranges[i].length;
}

/* What the list has of one object, from its entry `next` on, as a file. NULL: there is no memory or
 * descriptor for it. */
static struct warm_file *file_new(const struct warm *warm, const struct schedule *schedule,
				  size_t *next, bool unasked)
{
	const struct work *work = &schedule->work[AROUND];
	const struct plan_request *requests = schedule->plan->requests;
	uint32_t number = requests[work->requests[*next]].object;
	struct warm_file *file = os_calloc(1, sizeof(*file));
	size_t end = *next;

	if (!file)
		return NULL;
	while (end < work->count && requests[work->requests[end]].object == number)
		end++;
	file->ranges = os_calloc(end - *next, sizeof(file->ranges[0]));
	file->fd = os_duplicate(schedule->plan->objects[number]->fd);
	if (!file->ranges || file->fd < 0 || os_fstat(file->fd, &file->as_it_was)) {
		file_free(file);
		return NULL;
	}
	file->unasked = unasked;
	disk_of(warm->root, file->as_it_was.st_dev, &file->disk);
	add_ranges(file, schedule, next, end);
	return file;
}

static bool is_same(const struct stat *a, const struct stat *b)
{
	return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

static bool is_listed(const struct warm_file *file, struct warm_range range)
{
	for (size_t i = file->at; i < file->count; i++)
		if (file->ranges[i].offset <= range.offset &&
		    file->ranges[i].offset + file->ranges[i].length >= range.offset + range.length)
			return true;
	return false;
}

/* The same file of an earlier job that waits; NULL: there is none. */
static struct warm_file *find_locked(const struct warm *warm, const struct warm_file *file)
{
	struct warm_file *known = warm->first;

	while (known && (!known->left || known->unasked != file->unasked ||
			 !is_same(&known->as_it_was, &file->as_it_was) ||
			 !same_time(known->as_it_was.st_mtim, file->as_it_was.st_mtim)))
		known = known->next;
	return known;
}

/* It takes the ranges over, so that nobody who reads tensor by tensor has a descriptor for each.
 * False: there is none, or no memory. */
static bool join_locked(struct warm *warm, const struct warm_file *file)
{
	struct warm_file *known = find_locked(warm, file);
	struct warm_range *room;

	room = known ? os_realloc(known->ranges, known->count + file->count, sizeof(*room)) : NULL;
	if (!room)
		return false;
	known->ranges = room;
	for (size_t i = 0; i < file->count; i++)
		if (!is_listed(known, file->ranges[i])) {
			room[known->count++] = file->ranges[i];
			known->left += file->ranges[i].length;
			warm->left += file->ranges[i].length;
		}
	return true;
}

/* Put the files at the end of the list. */
static void add_locked(struct warm *warm, struct warm_file *files)
{
	while (files) {
		struct warm_file **end = &warm->first, *file = files;

		files = file->next;
		file->next = NULL;
		if (join_locked(warm, file)) {
			file_free(file);
			continue;
		}
		while (*end)
			end = &(*end)->next;
		*end = file;
		warm->left += file->left;
	}
}

/* See to it that there is a thread, or nothing to do for one. */
static int start_locked(struct warm *warm)
{
	pthread_t thread;
	int rc;

	if (warm->running || !warm->first)
		return 0;
	rc = os_thread_start_aside(&thread, warm_run, warm);
	if (!rc) {
		warm->running = true;
		pthread_detach(thread);
		return 0;
	}
	free_all(warm->first);
	warm->first = NULL;
	warm->left = 0;
	return rc;
}

/* How many files may wait. */
static size_t files_most(void)
{
	uint64_t part = os_files_limit() / FILES_PART;

	return part < FILES_MAX ? (size_t)part : FILES_MAX;
}

/* Bytes that would be left to read with these files; -EMFILE: too many files would wait. */
static int weigh_locked(const struct warm *warm, const struct warm_file *files, uint64_t *left)
{
	size_t count = 0;

	*left = warm->left;
	for (const struct warm_file *file = warm->first; file; file = file->next)
		count++;
	for (; files; files = files->next) {
		const struct warm_file *known = find_locked(warm, files);

		count += !known;
		for (size_t i = 0; i < files->count; i++)
			if (!known || !is_listed(known, files->ranges[i]))
				*left += files->ranges[i].length;
	}
	return count > files_most() ? -EMFILE : 0;
}

static bool on_own_disks(const struct plan *plan)
{
	for (size_t i = 0; i < plan->object_count; i++)
		if (!os_filesystem_is_own(plan->objects[i]->info.filesystem))
			return false;
	return true;
}

static size_t count_files(const struct schedule *schedule)
{
	const struct work *work = &schedule->work[AROUND];
	const struct plan_request *requests = schedule->plan->requests;
	size_t count = 0;

	for (size_t i = 0; i < work->count; i++)
		count += !i || requests[work->requests[i]].object !=
				       requests[work->requests[i - 1]].object;
	return count;
}

/* The files of a schedule, one after the other. */
static int files_new(const struct warm *warm, const struct schedule *schedule, bool unasked,
		     struct warm_file **files)
{
	struct warm_file **end = files;
	size_t next = 0;

	*files = NULL;
	/* Not even for a moment more descriptors than that. */
	if (count_files(schedule) > files_most())
		return -EMFILE;
	while (next < schedule->work[AROUND].count) {
		*end = file_new(warm, schedule, &next, unasked);
		if (!*end) {
			free_all(*files);
			*files = NULL;
			return -ENOMEM;
		}
		end = &(*end)->next;
	}
	return 0;
}

void warm_begin(struct warm *warm, const struct schedule *schedule, bool unasked, uint64_t *bytes,
		char reason[PEN_REASON_MAX])
{
	uint64_t available = memory_available(warm->root), wanted = 0, all = 0;
	struct warm_file *files;
	int rc;

	*bytes = 0;
	if (unasked && !on_own_disks(schedule->plan)) {
		text_copy(reason, PEN_REASON_MAX, "left out of the page cache: they are on no disk "
						  "of this machine, and nobody asked for it");
		return;
	}
	rc = files_new(warm, schedule, unasked, &files);
	for (struct warm_file *file = rc ? NULL : files; file; file = file->next)
		wanted += file->left;
	pthread_mutex_lock(&warm->lock);
	if (!rc)
		rc = weigh_locked(warm, files, &all);
	if (!rc && fits(all, available, unasked)) {
		add_locked(warm, files);
		files = NULL;
		rc = start_locked(warm);
		*bytes = rc ? 0 : wanted;
	}
	pthread_mutex_unlock(&warm->lock);
	free_all(files);
	if (rc == -EMFILE)
		text_copy(reason, PEN_REASON_MAX, "left out of the page cache: more files would "
						  "wait than may be held open for it");
	else if (rc)
		text_copy(reason, PEN_REASON_MAX, "left out of the page cache: there is no thread, "
						  "memory or descriptor to bring them in with");
	else if (*bytes)
		text_copy(reason, PEN_REASON_MAX, "being brought into the page cache in the "
						  "background; what is unread when the process "
						  "ends stays cold");
	else
		snprintf(reason, PEN_REASON_MAX,
			 "left out of the page cache: %llu MiB do not fit into %s%llu MiB of "
			 "memory that are available", (unsigned long long)all >> 20,
			 unasked ? "half of the " : "the ", (unsigned long long)available >> 20);
}

void warm_drop(struct warm *warm, const struct pen_object *object)
{
	struct stat own;

	if (os_fstat(object->fd, &own))
		return;
	pthread_mutex_lock(&warm->lock);
	for (struct warm_file *file = warm->first; file; file = file->next)
		if (is_same(&file->as_it_was, &own))
			give_up_locked(warm, file, "the file was dropped from the page cache");
	pthread_cond_broadcast(&warm->news);
	/* One that waited for its turn is not read any more. The thread may be at the first. */
	while (warm->first && warm->first->dropped && is_same(&warm->first->as_it_was, &own))
		pthread_cond_wait(&warm->news, &warm->lock);
	pthread_mutex_unlock(&warm->lock);
}

int warm_wait(struct warm *warm, double seconds)
{
	struct timespec until = os_from_now(seconds);
	int rc = 0;

	pthread_mutex_lock(&warm->lock);
	while (warm->first && !rc)
		rc = pthread_cond_timedwait(&warm->news, &warm->lock, &until);
	pthread_mutex_unlock(&warm->lock);
	return -rc;
}

void warm_stop(struct warm *warm)
{
	pthread_mutex_lock(&warm->lock);
	for (struct warm_file *file = warm->first; file; file = file->next)
		give_up_locked(warm, file, "it was stopped");
	pthread_cond_broadcast(&warm->news);
	pthread_mutex_unlock(&warm->lock);
}

/* ---------------------------------------------------------------------------------- public -- */

void pen_warming_poll(struct pen_warming *warming)
{
	struct pen_warming full = PEN_WARMING_INIT;
	size_t size = warming->size < sizeof(full) ? warming->size : sizeof(full);

	pthread_mutex_lock(&warm_process.lock);
	full.left = warm_process.left;
	full.brought = warm_process.brought;
	full.given_up = warm_process.given_up;
	text_copy(full.reason, sizeof(full.reason), warm_process.reason);
	pthread_mutex_unlock(&warm_process.lock);
	memcpy(warming, &full, size);
	warming->size = size;
}

int pen_warming_wait(double seconds)
{
	return warm_wait(&warm_process, seconds);
}

void pen_warming_stop(void)
{
	warm_stop(&warm_process);
}

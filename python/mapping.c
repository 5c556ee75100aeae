/* SPDX-License-Identifier: MIT */
/*
 * Files as memory: a private mapping of a whole file, which is a block like any other, and threads
 * that bring its pages in before anybody looks at them.
 *
 * Rules
 *   1. Readers never enter Python and touch no byte of the mapping themselves: the kernel is asked
 *      to, and answers with an error where the file has become shorter. They can be left behind by
 *      a process that ends.
 *   2. A reader counts in its block's `uses`, so the mapping outlives its last request. It looks
 *      after every piece whether anybody else is left, and ends if not.
 *   3. A forked child has no readers, whatever `uses` says; see block_release().
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "binding.h"

/* Linux 5.14; older kernels answer EINVAL. */
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

/* What a reader asks for at a time, and what the kernel is willing to begin in one call. */
#define PIECE ((uint64_t)4 << 20)
#define BEGUN_AT_ONCE ((uint64_t)1 << 20)

/* Readers of one call, and of the whole process: what is beyond comes when it is looked at. */
#define READERS 4
#define READERS_OF_PROCESS 16

/* Pages that are looked at before a file is taken for cached, and what one takes at most that
 * does not come from a disk, in ns. */
#define SAMPLES 128
#define SAMPLES_BY_TIME 16
#define FROM_CACHE 50000

struct piece {
	uint64_t offset, length;
};

/* The pieces that some readers share. */
struct errand {
	struct block *block;
	atomic_size_t next;
	atomic_uint readers;
	size_t count;
	struct piece pieces[];
};

static atomic_int readers_of_process;
static pid_t process;	/* that they are counted for, guarded by the GIL */

PyObject *map_file(PyObject *module, PyObject *args)
{
	struct device *device;
	unsigned long long size;
	void *address;
	int fd;

	(void)module;
	if (!PyArg_ParseTuple(args, "O!iK", device_type, &device, &fd, &size))
		return NULL;
	/* Writes go to private pages. Room for them is not reserved: a model may be larger than
	 * memory, and is seldom written to. */
	address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
	if (address == MAP_FAILED)
		return PyErr_SetFromErrno(PyExc_OSError);
	return memory_wrap(device->handle, address, size, true);
}

/* ------------------------------------------------------------------------------- readers -- */

/* Whole pages around a range of the block. */
static struct piece whole_pages(const struct block *block, struct piece piece)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), end = piece.offset + piece.length;

	piece.offset -= piece.offset % page;
	piece.length = (end < block->size ? end : block->size) - piece.offset;
	return piece;
}

/* Bring a piece into the page cache and wait until it is there. False: there is no point in going
 * on. */
static bool fetch(const struct block *block, struct piece piece)
{
	unsigned char *address = block->address + piece.offset;

	for (uint64_t begun = 0; begun < piece.length; begun += BEGUN_AT_ONCE) {
		uint64_t left = piece.length - begun;

		madvise(address + begun, left < BEGUN_AT_ONCE ? left : BEGUN_AT_ONCE,
			MADV_WILLNEED);
	}
	return !madvise(address, piece.length, MADV_POPULATE_READ) || errno == EINVAL;
}

static void errand_leave(struct errand *errand)
{
	if (atomic_fetch_sub_explicit(&errand->readers, 1, memory_order_acq_rel) == 1)
		free(errand);
}

static void reader_end(struct errand *errand)
{
	struct block *block = errand->block;

	errand_leave(errand);
	atomic_fetch_sub(&readers_of_process, 1);
	block_release_reader(block);
}

static void *read_pieces(void *argument)
{
	struct errand *errand = argument;
	size_t at = atomic_fetch_add(&errand->next, 1);

	while (at < errand->count && block_is_held(errand->block) &&
	       fetch(errand->block, errand->pieces[at]))
		at = atomic_fetch_add(&errand->next, 1);
	reader_end(errand);
	return NULL;
}

/* Start one more reader, with all signals blocked: they are for the program's own threads. */
static bool reader_start(struct errand *errand)
{
	sigset_t all, before;
	pthread_t thread;
	bool started;

	if (process != getpid()) {
		process = getpid();
		atomic_store(&readers_of_process, 0);
	}
	if (atomic_fetch_add(&readers_of_process, 1) >= READERS_OF_PROCESS) {
		atomic_fetch_sub(&readers_of_process, 1);
		return false;
	}
	block_hold_reader(errand->block);
	atomic_fetch_add(&errand->readers, 1);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	started = !pthread_create(&thread, NULL, read_pieces, errand);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (started)
		pthread_detach(thread);
	else
		reader_end(errand);
	return started;
}

/* One range of the list, which must lie in the block; false with an exception. */
static bool read_range(const struct block *block, PyObject *item, struct piece *range)
{
	unsigned long long offset, length;

	if (!PyArg_ParseTuple(item, "KK", &offset, &length))
		return false;
	if (offset > block->size || length > block->size - offset) {
		PyErr_SetString(PyExc_ValueError, "a range ends beyond the file");
		return false;
	}
	*range = (struct piece){ offset, length };
	return true;
}

/* How many pieces a list of (offset, length) makes; SIZE_MAX with an exception. */
static size_t pieces_of(const struct block *block, PyObject *ranges)
{
	struct piece range;
	size_t count = 0;

	for (Py_ssize_t i = 0; i < PyList_Size(ranges); i++) {
		if (!read_range(block, PyList_GetItem(ranges, i), &range))
			return SIZE_MAX;
		count += range.length / PIECE + (range.length % PIECE != 0);
	}
	return count;
}

static void cut(struct errand *errand, struct piece range)
{
	for (uint64_t done = 0; done < range.length; done += PIECE) {
		uint64_t left = range.length - done;
		struct piece piece = { range.offset + done, left < PIECE ? left : PIECE };

		errand->pieces[errand->count++] = whole_pages(errand->block, piece);
	}
}

/* The caller counts as a reader until errand_leave(). NULL with an exception. */
static struct errand *errand_new(struct block *block, PyObject *ranges)
{
	size_t count = pieces_of(block, ranges);
	struct errand *errand;
	struct piece range;

	if (count == SIZE_MAX)
		return NULL;
	errand = malloc(sizeof(*errand) + count * sizeof(errand->pieces[0]));
	if (!errand) {
		PyErr_NoMemory();
		return NULL;
	}
	errand->block = block;
	errand->count = 0;
	atomic_init(&errand->next, 0);
	atomic_init(&errand->readers, 1);
	for (Py_ssize_t i = 0; i < PyList_Size(ranges); i++)
		if (read_range(block, PyList_GetItem(ranges, i), &range))
			cut(errand, range);
	return errand;
}

/* Is a page in the page cache? The kernel tells the file's owner and who may write to it. Others
 * have it brought in and look how long that takes, which it will be anyway. */
static bool page_is_cached(void *page, bool told)
{
	struct timespec start, end;
	unsigned char cached;

	if (told)
		return !mincore(page, 1, &cached) && (cached & 1);
	clock_gettime(CLOCK_MONOTONIC, &start);
	madvise(page, 1, MADV_POPULATE_READ);
	clock_gettime(CLOCK_MONOTONIC, &end);
	return (end.tv_sec - start.tv_sec) * 1000000000 + end.tv_nsec - start.tv_nsec < FROM_CACHE;
}

/* Some of the pages are looked at, evenly spread. */
static bool seems_cached(const struct errand *errand, bool told)
{
	size_t most = told ? SAMPLES : SAMPLES_BY_TIME;
	size_t samples = errand->count < most ? errand->count : most;
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

	for (size_t i = 0; i < samples; i++) {
		struct piece piece = errand->pieces[i * errand->count / samples];
		uint64_t middle = piece.offset + piece.length / 2;

		if (!page_is_cached(errand->block->address + middle - middle % page, told))
			return false;
	}
	return true;
}

PyObject *memory_read_ahead(PyObject *self, PyObject *args)
{
	struct block *block = ((struct memory *)self)->block;
	struct errand *errand;
	PyObject *ranges;
	int told, started = 0;
	bool cached;

	if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &ranges, &told))
		return NULL;
	if (!block->mapped) {
		PyErr_SetString(PyExc_ValueError, "the memory is no file");
		return NULL;
	}
	errand = errand_new(block, ranges);
	if (!errand)
		return NULL;
	block_forget_readers(block);
	cached = seems_cached(errand, told);
	while (!cached && started < READERS && (size_t)started < errand->count &&
	       reader_start(errand))
		started++;
	errand_leave(errand);
	return PyBool_FromLong(!cached);
}

PyObject *memory_reading(PyObject *self, PyObject *unused)
{
	struct block *block = ((struct memory *)self)->block;

	(void)unused;
	block_forget_readers(block);
	return PyBool_FromLong(block_has_readers(block));
}

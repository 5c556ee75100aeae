/* SPDX-License-Identifier: MIT */
/* Plain loops over storage and over PCIe; see ceiling.h. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>
#include "base/pattern.h"
#include "ceiling.h"

#define THREADS_MAX 64
#define HUGE_PAGE (2 * MIB)

const char *geometry_text(struct geometry geometry)
{
	static char texts[8][48];
	static int turn;

	turn = (turn + 1) % 8;
	snprintf(texts[turn], sizeof(texts[turn]), "%d x %llu MiB", geometry.threads,
		 (unsigned long long)(geometry.request / MIB));
	return texts[turn];
}

unsigned char *huge_memory(uint64_t size)
{
	unsigned char *raw = mmap(NULL, size + HUGE_PAGE, PROT_READ | PROT_WRITE,
				  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	unsigned char *memory;

	if (raw == MAP_FAILED)
		die("%s of memory cannot be had", size_text(size));
	memory = (unsigned char *)(((uintptr_t)raw + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
	madvise(memory, size, MADV_HUGEPAGE);
	for (uint64_t at = 0; at < size; at += 4096)
		memory[at] = 0;
	return memory;
}

/* ---------------------------------------------------------------------------- storage -- */

/* One loop, shared by its threads. */
struct loop {
	int fd;
	bool write, pattern, spread;	/* spread: memory holds the whole range */
	uint64_t request, offset, end;
	unsigned char *memory;
	_Atomic uint64_t cursor;
	atomic_int error;		/* errno of the first failure */
	pthread_barrier_t start;
};

struct worker {
	pthread_t thread;
	struct loop *loop;
	int index;
};

static void *work(void *argument)
{
	struct worker *worker = argument;
	struct loop *loop = worker->loop;

	pthread_barrier_wait(&loop->start);
	for (;;) {
		uint64_t at = atomic_fetch_add(&loop->cursor, loop->request), length;
		unsigned char *buffer;
		ssize_t done;

		if (at >= loop->end || atomic_load(&loop->error))
			break;
		length = loop->end - at < loop->request ? loop->end - at : loop->request;
		buffer = loop->memory + (loop->spread ? at - loop->offset
						      : (uint64_t)worker->index * loop->request);
		if (loop->pattern)
			pattern_fill(buffer, length, at);
		done = loop->write ? pwrite(loop->fd, buffer, length, (off_t)at)
				   : pread(loop->fd, buffer, length, (off_t)at);
		if (done != (ssize_t)length) {
			atomic_store(&loop->error, done < 0 ? errno : EIO);
			break;
		}
	}
	return NULL;
}

static double run(struct loop *loop, struct geometry geometry, uint64_t offset, uint64_t length)
{
	struct worker workers[THREADS_MAX];
	double start;

	if (geometry.threads > THREADS_MAX ||
	    (!loop->spread && (uint64_t)geometry.threads * geometry.request > STAGE_SIZE))
		die("%s is too much for the plain loop", geometry_text(geometry));
	loop->request = geometry.request;
	loop->offset = offset;
	loop->cursor = offset;
	loop->end = offset + length;
	pthread_barrier_init(&loop->start, NULL, (unsigned int)geometry.threads + 1);
	for (int i = 0; i < geometry.threads; i++) {
		workers[i].loop = loop;
		workers[i].index = i;
		if (pthread_create(&workers[i].thread, NULL, work, &workers[i]))
			die("a thread could not be started");
	}
	start = now();
	pthread_barrier_wait(&loop->start);
	for (int i = 0; i < geometry.threads; i++)
		pthread_join(workers[i].thread, NULL);
	pthread_barrier_destroy(&loop->start);
	if (loop->error)
		die("plain %s of %s: %s", loop->write ? "write" : "read", geometry_text(geometry),
		    strerror(loop->error));
	return now() - start;
}

double raw_read(int fd, struct geometry geometry, uint64_t offset, uint64_t length,
		unsigned char *stage)
{
	struct loop loop = { .fd = fd, .memory = stage };

	return run(&loop, geometry, offset, length);
}

double raw_read_to(int fd, struct geometry geometry, uint64_t offset, uint64_t length,
		   unsigned char *memory)
{
	struct loop loop = { .fd = fd, .memory = memory, .spread = true };

	return run(&loop, geometry, offset, length);
}

double raw_write(const char *path, struct geometry geometry, uint64_t length,
		 unsigned char *memory, enum raw_source source)
{
	struct loop loop = { .write = true, .pattern = source == FROM_PATTERN,
			     .spread = source == FROM_MEMORY, .memory = memory };
	double seconds, flush;

	unlink(path);
	loop.fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_DIRECT, 0644);
	if (loop.fd < 0 && errno == EINVAL)
		loop.fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
	if (loop.fd < 0)
		die("make %s: %s", path, strerror(errno));
	/* Some file systems cannot reserve; then the loop shows what they give without. */
	if (fallocate(loop.fd, 0, 0, (off_t)length) && errno != EOPNOTSUPP)
		die("reserve %s for %s: %s", size_text(length), path, strerror(errno));
	fsync(loop.fd);
	seconds = run(&loop, geometry, 0, length);
	flush = now();
	if (fdatasync(loop.fd))
		die("flush %s: %s", path, strerror(errno));
	seconds += now() - flush;
	close(loop.fd);
	return seconds;
}

/* -------------------------------------------------------------------------------- GPU -- */

#define COPY_SIZE (16 * MIB)
#define PLAIN_SLOTS 3
#define PLAIN_SIZE (2 * MIB)
#define POLL_NS 20000

static void cuda_check(struct gpu *gpu, cuda_result result, const char *operation)
{
	struct pen_error err;

	if (result)
		check(cuda_error(gpu->cuda, result, operation, "the GPU", &err), &err);
}

int gpu_open(struct gpu *gpu, int index, unsigned char *stage, struct pen_error *err)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	void *set_bytes = library ? dlsym(library, "cuMemsetD8_v2") : NULL;
	cuda_result result;

	memset(gpu, 0, sizeof(*gpu));
	gpu->stage = stage;
	gpu->cuda = cuda_open(err);
	if (!gpu->cuda)
		return err->code;
	memcpy(&gpu->set_bytes, &set_bytes, sizeof(set_bytes));
	result = gpu->cuda->cuInit(0);
	if (!result)
		result = gpu->cuda->cuDeviceGet(&gpu->device, index);
	if (!result)
		result = gpu->cuda->cuDevicePrimaryCtxRetain(&gpu->context, gpu->device);
	if (!result)
		result = gpu->cuda->cuCtxSetCurrent(gpu->context);
	for (int i = 0; i < 2 && !result; i++)
		result = gpu->cuda->cuStreamCreate(&gpu->streams[i], CUDA_STREAM_NON_BLOCKING);
	if (!result)
		result = gpu->cuda->cuMemHostRegister_v2(stage, STAGE_SIZE, CUDA_REGISTER_PORTABLE);
	return result ? cuda_error(gpu->cuda, result, "open", "the GPU", err) : 0;
}

void gpu_close(struct gpu *gpu)
{
	if (!gpu->context)
		return;
	gpu->cuda->cuMemHostUnregister(gpu->stage);
	for (int i = 0; i < 2; i++)
		gpu->cuda->cuStreamDestroy_v2(gpu->streams[i]);
	gpu->cuda->cuCtxSetCurrent(NULL);
	gpu->cuda->cuDevicePrimaryCtxRelease_v2(gpu->device);
	gpu->context = NULL;
}

double gpu_copy(struct gpu *gpu, bool to_gpu, void *memory, uint64_t length, int streams)
{
	double start = now();

	for (uint64_t at = 0, i = 0; at < length; at += COPY_SIZE, i++) {
		uint64_t size = length - at < COPY_SIZE ? length - at : COPY_SIZE;
		unsigned char *host = gpu->stage + i * COPY_SIZE % STAGE_SIZE;
		cuda_pointer device = (cuda_pointer)(uintptr_t)memory + at;
		void *stream = gpu->streams[i % (uint64_t)streams];
		cuda_result result =
			to_gpu ? gpu->cuda->cuMemcpyHtoDAsync_v2(device, host, size, stream)
			       : gpu->cuda->cuMemcpyDtoHAsync_v2(host, device, size, stream);

		cuda_check(gpu, result, "copy");
	}
	for (int i = 0; i < streams; i++)
		cuda_check(gpu, gpu->cuda->cuStreamSynchronize(gpu->streams[i]), "copy");
	return now() - start;
}

void gpu_poison(struct gpu *gpu, void *memory, uint64_t length)
{
	if (!gpu->set_bytes)
		return;
	cuda_check(gpu, gpu->set_bytes((cuda_pointer)(uintptr_t)memory, 0xEE, length), "fill");
	cuda_check(gpu, gpu->cuda->cuStreamSynchronize(NULL), "fill");
}

/* What the plain readers share, and what each has. */
struct plain {
	struct gpu *gpu;
	int fd;
	uint64_t length;
	unsigned char *memory;
	_Atomic uint64_t cursor;
	pthread_barrier_t start;
};

struct plain_reader {
	pthread_t thread;
	struct plain *plain;
	unsigned char *slots;
	void *stream, *events[PLAIN_SLOTS];
};

static void plain_wait(struct gpu *gpu, void *event)
{
	const struct timespec pause = { .tv_nsec = POLL_NS };
	cuda_result result;

	while ((result = gpu->cuda->cuEventQuery(event)) == CUDA_NOT_READY)
		nanosleep(&pause, NULL);
	cuda_check(gpu, result, "copy");
}

static void *plain_read(void *argument)
{
	struct plain_reader *reader = argument;
	struct plain *plain = reader->plain;
	struct gpu *gpu = plain->gpu;
	bool used[PLAIN_SLOTS] = { false };

	prctl(PR_SET_TIMERSLACK, 1ul);
	cuda_check(gpu, gpu->cuda->cuCtxSetCurrent(gpu->context), "enter");
	pthread_barrier_wait(&plain->start);
	for (int slot = 0;; slot = (slot + 1) % PLAIN_SLOTS) {
		uint64_t at = atomic_fetch_add(&plain->cursor, PLAIN_SIZE), size;
		unsigned char *buffer = reader->slots + (uint64_t)slot * PLAIN_SIZE;

		if (at >= plain->length)
			break;
		size = plain->length - at < PLAIN_SIZE ? plain->length - at : PLAIN_SIZE;
		if (used[slot])
			plain_wait(gpu, reader->events[slot]);
		if (pread(plain->fd, buffer, size, (off_t)at) != (ssize_t)size)
			die("plain read: %s", strerror(errno));
		cuda_check(gpu, gpu->cuda->cuMemcpyHtoDAsync_v2(
				(cuda_pointer)(uintptr_t)plain->memory + at, buffer, size,
				reader->stream), "copy");
		cuda_check(gpu, gpu->cuda->cuEventRecord(reader->events[slot], reader->stream),
			   "mark");
		used[slot] = true;
	}
	for (int slot = 0; slot < PLAIN_SLOTS; slot++)
		if (used[slot])
			plain_wait(gpu, reader->events[slot]);
	return NULL;
}

double gpu_plain_read(struct gpu *gpu, int fd, void *memory, uint64_t length, int threads)
{
	struct plain plain = { .gpu = gpu, .fd = fd, .length = length, .memory = memory };
	struct plain_reader readers[8];
	double start;

	if (threads > 8)
		die("more than 8 plain readers");
	pthread_barrier_init(&plain.start, NULL, (unsigned int)threads + 1);
	for (int i = 0; i < threads; i++) {
		struct plain_reader *reader = &readers[i];

		reader->plain = &plain;
		reader->slots = gpu->stage + (uint64_t)i * PLAIN_SLOTS * PLAIN_SIZE;
		cuda_check(gpu, gpu->cuda->cuStreamCreate(&reader->stream,
							  CUDA_STREAM_NON_BLOCKING),
			   "make a stream on");
		for (int slot = 0; slot < PLAIN_SLOTS; slot++)
			cuda_check(gpu, gpu->cuda->cuEventCreate(&reader->events[slot],
								 CUDA_EVENT_NO_TIMING),
				   "make an event on");
		if (pthread_create(&reader->thread, NULL, plain_read, reader))
			die("a thread could not be started");
	}
	start = now();
	pthread_barrier_wait(&plain.start);
	for (int i = 0; i < threads; i++)
		pthread_join(readers[i].thread, NULL);
	start = now() - start;
	for (int i = 0; i < threads; i++) {
		for (int slot = 0; slot < PLAIN_SLOTS; slot++)
			gpu->cuda->cuEventDestroy_v2(readers[i].events[slot]);
		gpu->cuda->cuStreamDestroy_v2(readers[i].stream);
	}
	pthread_barrier_destroy(&plain.start);
	return start;
}

/* SPDX-License-Identifier: MIT */
#ifndef BENCH_CEILING_H
#define BENCH_CEILING_H
/*
 * What the hardware gives to the plainest code there is: threads that call pread or pwrite in a
 * loop, and copies between pinned memory and the GPU one after the other. Penstock is measured
 * against these, in the same process and the same minute. Nothing here uses the engine.
 *
 * Loops work in `stage` unless they say otherwise: huge-page memory, one request per thread. Every
 * function returns seconds and ends the program where something fails.
 */
#include "measure.h"
#include "sys/cuda.h"

#define STAGE_SIZE (64 * MIB)

struct geometry {
	int threads;
	uint64_t request;
};

/* "8 x 1.00 MiB", in one of a few buffers that take turns. */
const char *geometry_text(struct geometry geometry);

/* Huge-page memory, touched. */
unsigned char *huge_memory(uint64_t size);

/* Threads read the range through `fd` into the stage. */
double raw_read(int fd, struct geometry geometry, uint64_t offset, uint64_t length,
		unsigned char *stage);

/* The same into memory that holds all of the range, which is what host memory can get. */
double raw_read_to(int fd, struct geometry geometry, uint64_t offset, uint64_t length,
		   unsigned char *memory);

/*
 * Make `path` anew with space reserved, write it around the page cache, flush. Reserving is not
 * in the time, flushing is. The bytes are those of the stage as it is, or the pattern made in the
 * stage on the way, or those of memory that holds all of the file.
 */
enum raw_source { FROM_STAGE, FROM_PATTERN, FROM_MEMORY };

double raw_write(const char *path, struct geometry geometry, uint64_t length,
		 unsigned char *memory, enum raw_source source);

/* A GPU for the loops below; `stage` is registered with it. */
struct gpu {
	const struct cuda_api *cuda;
	cuda_device device;
	void *context;
	void *streams[2];
	unsigned char *stage;
	cuda_result (*set_bytes)(cuda_pointer, unsigned char, size_t);
};

int gpu_open(struct gpu *gpu, int index, unsigned char *stage, struct pen_error *err);
void gpu_close(struct gpu *gpu);

/* Copies of 16 MiB between the stage and `memory`, over one or two streams. */
double gpu_copy(struct gpu *gpu, bool to_gpu, void *memory, uint64_t length, int streams);

/* Fill GPU memory with bytes that no pattern has, so that what was not written shows. */
void gpu_poison(struct gpu *gpu, void *memory, uint64_t length);

/*
 * What somebody would write in an afternoon: each thread reads 2 MiB through `fd` into one of
 * three pinned slots, starts the copy, polls the event of the slot it wants next.
 */
double gpu_plain_read(struct gpu *gpu, int fd, void *memory, uint64_t length, int threads);

#endif

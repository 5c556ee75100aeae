/* SPDX-License-Identifier: MIT */
#ifndef MEM_DEVICE_H
#define MEM_DEVICE_H
/*
 * A device is where bytes land: host memory, or one GPU. Code above calls the device_*() wrappers
 * only; they check the contract both ways. The table behind them has every slot filled.
 *
 * Invariants
 *   1. Nothing here blocks except ready(), alloc(), free(), get(), put(), fence_behind(),
 *      stream_drain(), stream_close().
 *   2. copy() and mark() are in the order of their stream; a fence that has passed means that
 *      all copies before it are complete and the host memory they used is free again.
 *   3. There is one open pen_device per name in the process, counted; so "pinned by this device"
 *      is well defined.
 *   4. A GPU belongs to the process that opened it. A forked child inherits the handle, and all
 *      that it gets from it is an error; giving things back there does nothing.
 */
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/coding.h"
#include "base/form.h"
#include "penstock.h"

struct pen_device;

/*
 * `rows` rows of `width` bytes between device memory and host memory. rows == 1: pitches unused.
 * With a form, `width` is of the host's bytes, which must be pinned for a GPU: it reads them by
 * itself. One that cannot returns -ENOTSUP, and nothing is queued.
 */
struct device_copy {
	unsigned char *memory;		/* device address */
	unsigned char *host;
	size_t width;
	size_t rows;
	size_t memory_pitch, host_pitch;
	bool to_device;
	const struct form *form;	/* what they become on their way to the device; or NULL */
};

struct device_stream {
	void *handle;	/* CUstream, or NULL on the host */
	bool lent;	/* a library knows it: it is not kept for others when it is closed */
};

struct device_fence {
	void *handle;		/* CUevent, or NULL on the host */
	unsigned int *verdict;	/* of what was decoded before it; NULL: nothing ever was */
};

/* Each function: 0 or a negative errno with words in err. "Lane": called by a lane's thread after
 * enter(). "Any": called by any thread. */
struct device_ops {
	const char *kind;

	/* Any. Start what must be started; returns soon. */
	int (*open)(struct pen_device *device, struct pen_error *err);

	/* Any. Wait until bytes can be taken, or say why never. */
	int (*ready)(struct pen_device *device, struct pen_error *err);

	/* Lane, never blocks: 0 usable, -EAGAIN not yet, else broken. */
	int (*poll_ready)(struct pen_device *device, struct pen_error *err);

	/* Lane. Make the device current for this thread; after poll_ready() gave 0. */
	int (*enter)(struct pen_device *device, struct pen_error *err);

	/* Any. */
	int (*alloc)(struct pen_device *device, uint64_t size, void **memory,
		     struct pen_error *err);
	int (*free)(struct pen_device *device, void *memory, uint64_t size, struct pen_error *err);
	int (*get)(struct pen_device *device, void *host, const void *memory, uint64_t size,
		   struct pen_error *err);
	int (*put)(struct pen_device *device, void *memory, const void *host, uint64_t size,
		   struct pen_error *err);

	/* Lane. Let the device read and write this host memory by itself. A file mapping is pinned
	 * read_only. A copy must lie inside one pinned range. */
	int (*pin)(struct pen_device *device, void *host, size_t size, bool read_only,
		   struct pen_error *err);
	/* Any. */
	int (*unpin)(struct pen_device *device, void *host, struct pen_error *err);

	/* Lane. A stream orders copies; lanes may share one. Draining and closing wait for all that
	 * was queued, errors or not. */
	int (*stream_open)(struct pen_device *device, struct device_stream *stream,
			   struct pen_error *err);
	void (*stream_drain)(struct pen_device *device, struct device_stream *stream);
	void (*stream_close)(struct pen_device *device, struct device_stream *stream);

	/* Any. A fence not marked yet has passed. */
	int (*fence_open)(struct pen_device *device, struct device_fence *fence,
			  struct pen_error *err);
	void (*fence_close)(struct pen_device *device, struct device_fence *fence);

	/* Any; may wait like ready(). A new fence behind all that the caller's own stream holds
	 * now. It must be the caller's thread: CUDA has a handle for "the stream of this thread".
	 * On an error there is no fence. */
	int (*fence_behind)(struct pen_device *device, void *callers_stream,
			    struct device_fence *fence, struct pen_error *err);

	/* Lane. What is queued on the stream from now on comes after the fence has passed. */
	int (*wait)(struct pen_device *device, struct device_stream *stream,
		    const struct device_fence *fence, struct pen_error *err);

	/* Lane. */
	int (*copy)(struct pen_device *device, struct device_stream *stream,
		    const struct device_copy *copy, struct pen_error *err);
	/* Lane. Decode chunks out of pinned host memory; the device reads them by itself, in the
	 * order of the stream. Where one turns out to be damaged, the fence's verdict becomes
	 * `mark` + its number in the part + 1. -ENOTSUP: a core has to do it, nothing is queued. */
	int (*decode)(struct pen_device *device, struct device_stream *stream,
		      const struct coding_part *part, unsigned int mark,
		      struct device_fence *fence, struct pen_error *err);
	int (*mark)(struct pen_device *device, struct device_stream *stream,
		    struct device_fence *fence, struct pen_error *err);
	/* 0 passed, -EAGAIN not yet, else the copies before it failed. */
	int (*poll)(struct pen_device *device, struct device_fence *fence, struct pen_error *err);

	/* Any; the last user has gone. */
	void (*close)(struct pen_device *device);
};

/* On a machine with several NUMA nodes, while the driver has not told the GPU's yet. */
#define NODE_PENDING (-2)

struct pen_device {
	const struct device_ops *ops;
	char name[32];		/* "host", "cuda:0" */
	bool is_host;		/* the CPU and system calls can read and write its memory */
	bool maps;		/* can pin file mappings read-only (the mapped path) */
	atomic_bool no_kernels;	/* of a GPU: it was found that it starts none */
	int index;		/* of the GPU; -1 on the host */
	atomic_int node;	/* NUMA node; -1: unknown, or there is one; or NODE_PENDING */
	unsigned int users;	/* guarded by the registry's lock in device.c */
	unsigned int generation;	/* os_generation() of the process that opened it */
	atomic_uint allocations;	/* out with the user; they keep the device up */
	void *state;		/* the implementation's own */
	struct pen_device *next;
};

extern const struct device_ops device_host_ops;
extern const struct device_ops device_cuda_ops;

static inline int device_node(struct pen_device *device)
{
	return atomic_load(&device->node);
}

/* Was it opened before this process was forked, and is it of no use here? */
bool device_inherited(const struct pen_device *device);
int device_poll_ready(struct pen_device *device, struct pen_error *err);
int device_enter(struct pen_device *device, struct pen_error *err);
int device_pin(struct pen_device *device, void *host, size_t size, bool read_only,
	       struct pen_error *err);
int device_unpin(struct pen_device *device, void *host, struct pen_error *err);
int device_stream_open(struct pen_device *device, struct device_stream *stream,
		       struct pen_error *err);
void device_stream_drain(struct pen_device *device, struct device_stream *stream);
void device_stream_close(struct pen_device *device, struct device_stream *stream);
int device_fence_open(struct pen_device *device, struct device_fence *fence,
		      struct pen_error *err);
void device_fence_close(struct pen_device *device, struct device_fence *fence);
int device_fence_behind(struct pen_device *device, void *callers_stream,
			struct device_fence *fence, struct pen_error *err);
int device_wait(struct pen_device *device, struct device_stream *stream,
		const struct device_fence *fence, struct pen_error *err);
int device_copy(struct pen_device *device, struct device_stream *stream,
		const struct device_copy *copy, struct pen_error *err);
int device_decode(struct pen_device *device, struct device_stream *stream,
		  const struct coding_part *part, unsigned int mark, struct device_fence *fence,
		  struct pen_error *err);
/* Of a fence that has passed: 0, or which chunk was damaged. */
unsigned int device_verdict(const struct device_fence *fence);
int device_mark(struct pen_device *device, struct device_stream *stream,
		struct device_fence *fence, struct pen_error *err);
int device_poll(struct pen_device *device, struct device_fence *fence, struct pen_error *err);

#endif

/* SPDX-License-Identifier: MIT */
/*
 * The devices of this process: found by name, shared, counted; and the one wrapper around the
 * table that checks its contract.
 */
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "mem/device.h"
#include "mem/pool.h"
#include "sys/os.h"

#define GPU_INDEX_MAX 255

static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static struct pen_device *registry;	/* guarded by registry_lock */

/* The thread that would have learnt a GPU's node is not in this process. */
static void forget_starters(void)
{
	for (struct pen_device *device = registry; device; device = device->next)
		if (device_node(device) == NODE_PENDING)
			device->node = -1;
}

__attribute__((constructor)) static void mind_forks(void)
{
	os_at_fork(OS_FORK_DEVICES, &registry_lock, forget_starters);
}

bool device_inherited(const struct pen_device *device)
{
	return !device->is_host && device->generation != os_generation();
}

/* "host", "host:" or "cuda:N"; "cuda" alone is cuda:0. */
static int parse_name(const char *name, const struct device_ops **ops, int *index,
		      struct pen_error *err)
{
	uint64_t number = 0;

	if (!strcmp(name, "host") || !strcmp(name, "host:")) {
		*ops = &device_host_ops;
		*index = -1;
		return 0;
	}
	if (!strcmp(name, "cuda") ||
	    (!strncmp(name, "cuda:", 5) && !text_to_number(name + 5, GPU_INDEX_MAX, &number))) {
		*ops = &device_cuda_ops;
		*index = (int)number;
		return 0;
	}
	error_set(err, -EINVAL, "open device", name, -1, "there is no device of this name");
	error_hint(err, "Devices are host and cuda:N, N from 0");
	return -EINVAL;
}

static int open_locked(const struct device_ops *ops, int index, struct pen_device **device,
		       struct pen_error *err)
{
	struct pen_device *found;
	char name[sizeof(found->name)];
	int rc;

	if (index < 0)
		text_copy(name, sizeof(name), ops->kind);
	else
		snprintf(name, sizeof(name), "%s:%d", ops->kind, index);
	for (found = registry; found; found = found->next)
		if (!strcmp(found->name, name) && !device_inherited(found)) {
			found->users++;
			*device = found;
			return 0;
		}
	found = os_calloc(1, sizeof(*found));
	if (!found)
		return error_sys(err, -ENOMEM, "open device", ops->kind, -1);
	found->ops = ops;
	found->index = index;
	found->node = -1;
	found->users = 1;
	found->generation = os_generation();
	strcpy(found->name, name);
	rc = ops->open(found, err);
	if (rc) {
		free(found);
		return rc;
	}
	found->next = registry;
	registry = found;
	*device = found;
	return 0;
}

int pen_device_open(const char *name, struct pen_device **device, struct pen_error *err)
{
	const struct device_ops *ops;
	int index, rc;

	error_clear(err);
	*device = NULL;
	rc = parse_name(name, &ops, &index, err);
	if (rc)
		return rc;
	pthread_mutex_lock(&registry_lock);
	rc = open_locked(ops, index, device, err);
	pthread_mutex_unlock(&registry_lock);
	return rc;
}

/* One user less. True for the last: the device is its alone then. */
static bool unlink_last(struct pen_device *device)
{
	struct pen_device **link = &registry;
	bool last;

	pthread_mutex_lock(&registry_lock);
	assert(device->users);
	/* With memory of its still in use it only looks closed; the next user finds it as it is. */
	last = --device->users == 0 && !atomic_load(&device->allocations);
	if (last) {
		while (*link != device)
			link = &(*link)->next;
		*link = device->next;
	}
	pthread_mutex_unlock(&registry_lock);
	return last;
}

void pen_device_close(struct pen_device *device)
{
	/* One that was inherited stays in the registry, for nobody. */
	if (!device || device_inherited(device) || !unlink_last(device))
		return;
	/* Not under the lock: a driver that is still starting is waited for, and may fork. */
	piece_trim(device);
	device->ops->close(device);
	free(device);
}

const char *pen_device_name(const struct pen_device *device)
{
	return device->name;
}

int pen_device_ready(struct pen_device *device, struct pen_error *err)
{
	error_clear(err);
	return device->ops->ready(device, err);
}

int pen_device_alloc(struct pen_device *device, uint64_t size, void **memory, struct pen_error *err)
{
	int rc;

	error_clear(err);
	*memory = NULL;
	rc = device->ops->alloc(device, size ? size : 1, memory, err);
	assert(rc <= 0 && (rc || *memory));
	if (!rc)
		atomic_fetch_add(&device->allocations, 1);
	return rc;
}

int pen_device_free(struct pen_device *device, void *memory, uint64_t size, struct pen_error *err)
{
	int rc;

	error_clear(err);
	if (!memory || device_inherited(device))
		return 0;
	rc = device->ops->free(device, memory, size ? size : 1, err);
	if (!rc)
		atomic_fetch_sub(&device->allocations, 1);
	return rc;
}

int pen_device_get(struct pen_device *device, void *host, const void *memory, uint64_t size,
		   struct pen_error *err)
{
	error_clear(err);
	return size ? device->ops->get(device, host, memory, size, err) : 0;
}

int pen_device_put(struct pen_device *device, void *memory, const void *host, uint64_t size,
		   struct pen_error *err)
{
	error_clear(err);
	return size ? device->ops->put(device, memory, host, size, err) : 0;
}

int device_poll_ready(struct pen_device *device, struct pen_error *err)
{
	int rc = device->ops->poll_ready(device, err);

	assert(rc <= 0);
	return rc;
}

int device_enter(struct pen_device *device, struct pen_error *err)
{
	return device->ops->enter(device, err);
}

int device_pin(struct pen_device *device, void *host, size_t size, bool read_only,
	       struct pen_error *err)
{
	assert(host && size);
	return device->ops->pin(device, host, size, read_only, err);
}

int device_unpin(struct pen_device *device, void *host, struct pen_error *err)
{
	return device->ops->unpin(device, host, err);
}

int device_stream_open(struct pen_device *device, struct device_stream *stream,
		       struct pen_error *err)
{
	return device->ops->stream_open(device, stream, err);
}

void device_stream_drain(struct pen_device *device, struct device_stream *stream)
{
	device->ops->stream_drain(device, stream);
}

void device_stream_close(struct pen_device *device, struct device_stream *stream)
{
	device->ops->stream_close(device, stream);
}

int device_fence_open(struct pen_device *device, struct device_fence *fence, struct pen_error *err)
{
	return device->ops->fence_open(device, fence, err);
}

void device_fence_close(struct pen_device *device, struct device_fence *fence)
{
	device->ops->fence_close(device, fence);
}

int device_fence_behind(struct pen_device *device, void *callers_stream,
			struct device_fence *fence, struct pen_error *err)
{
	return device->ops->fence_behind(device, callers_stream, fence, err);
}

int device_wait(struct pen_device *device, struct device_stream *stream,
		const struct device_fence *fence, struct pen_error *err)
{
	return device->ops->wait(device, stream, fence, err);
}

int device_copy(struct pen_device *device, struct device_stream *stream,
		const struct device_copy *copy, struct pen_error *err)
{
	assert(copy->width && copy->rows && copy->memory && copy->host);
	assert(copy->rows == 1 || (copy->memory_pitch >= form_bytes(copy->form, copy->width) &&
				   copy->host_pitch >= copy->width));
	assert(!copy->form || (copy->to_device && copy->width % copy->form->from_size == 0));
	return device->ops->copy(device, stream, copy, err);
}

int device_decode(struct pen_device *device, struct device_stream *stream,
		  const struct coding_part *part, unsigned int mark, struct device_fence *fence,
		  struct pen_error *err)
{
	assert(part->count && part->memory && (uintptr_t)part->stored % PLANES_ALIGN == 0);
	return device->ops->decode(device, stream, part, mark, fence, err);
}

unsigned int device_verdict(const struct device_fence *fence)
{
	/* A GPU wrote it before it let the fence pass, so it is not read before that was seen. */
	atomic_thread_fence(memory_order_acquire);
	return fence->verdict ? *(volatile unsigned int *)fence->verdict : 0;
}

int device_mark(struct pen_device *device, struct device_stream *stream,
		struct device_fence *fence, struct pen_error *err)
{
	return device->ops->mark(device, stream, fence, err);
}

int device_poll(struct pen_device *device, struct device_fence *fence, struct pen_error *err)
{
	int rc = device->ops->poll(device, fence, err);

	assert(rc <= 0);
	return rc;
}

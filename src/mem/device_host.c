/* SPDX-License-Identifier: MIT */
/*
 * Host memory as a device. Copies happen at once, so fences have always passed; memory needs no
 * pinning. The engine mostly reads straight into this device's memory and copies nothing.
 *
 * Small allocations come from the heap: a process has room for some 65,000 mappings only
 * (vm.max_map_count), and a model may have more tensors than that. Their size tells them apart
 * when they are freed.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "mem/device.h"
#include "sys/os.h"

/* What is smaller comes from the heap; whole pages of it aligned so that a disk can write there. */
#define MAPPED_FROM ((uint64_t)1 << 20)
#define LEAST_ALIGNMENT 256

static int host_open(struct pen_device *device, struct pen_error *err)
{
	(void)err;
	device->is_host = true;
	return 0;
}

/* Everything that has nothing to do on the host. */
static int host_nothing(struct pen_device *device, struct pen_error *err)
{
	(void)device;
	(void)err;
	return 0;
}

static int alloc_failed(struct pen_device *device, int code, uint64_t size, struct pen_error *err)
{
	uint64_t available = os_memory_available();

	error_sys(err, code, "allocate memory on", device->name, -1);
	if (code == -ENOMEM && size <= available)
		error_hint(err, "%llu bytes were asked for, %llu are available: the process has "
				"too many mappings (raise vm.max_map_count) or a limit (ulimit -v)",
			   (unsigned long long)size, (unsigned long long)available);
	else
		error_hint(err, "%llu bytes were asked for, %llu are available",
			   (unsigned long long)size, (unsigned long long)available);
	return code;
}

static int host_alloc(struct pen_device *device, uint64_t size, void **memory,
		      struct pen_error *err)
{
	int rc;

	if (size < MAPPED_FROM) {
		*memory = os_calloc_aligned(size < os_page_size() ? LEAST_ALIGNMENT
								  : os_page_size(), size);
		rc = *memory ? 0 : -ENOMEM;
	} else {
		/* The kernel would promise it, and kill somebody when it is used. */
		rc = size > os_memory_available() ? -ENOMEM : os_map_huge(size, -1, memory);
	}
	return rc ? alloc_failed(device, rc, size, err) : 0;
}

static int host_free(struct pen_device *device, void *memory, uint64_t size, struct pen_error *err)
{
	int rc = 0;

	if (size < MAPPED_FROM)
		free(memory);
	else
		rc = os_unmap(memory, size);
	return rc ? error_sys(err, rc, "free memory on", device->name, -1) : 0;
}

static int host_get(struct pen_device *device, void *host, const void *memory, uint64_t size,
		    struct pen_error *err)
{
	(void)device;
	(void)err;
	memcpy(host, memory, size);
	return 0;
}

static int host_put(struct pen_device *device, void *memory, const void *host, uint64_t size,
		    struct pen_error *err)
{
	return host_get(device, memory, host, size, err);
}

static int host_pin(struct pen_device *device, void *host, size_t size, bool read_only,
		    struct pen_error *err)
{
	(void)device;
	(void)host;
	(void)size;
	(void)read_only;
	(void)err;
	return 0;
}

static int host_unpin(struct pen_device *device, void *host, struct pen_error *err)
{
	(void)device;
	(void)host;
	(void)err;
	return 0;
}

static int host_stream_open(struct pen_device *device, struct device_stream *stream,
			    struct pen_error *err)
{
	(void)device;
	(void)err;
	stream->handle = NULL;
	return 0;
}

static void host_stream_drain(struct pen_device *device, struct device_stream *stream)
{
	(void)device;
	(void)stream;
}

static void host_stream_close(struct pen_device *device, struct device_stream *stream)
{
	(void)device;
	(void)stream;
}

static int host_fence_open(struct pen_device *device, struct device_fence *fence,
			   struct pen_error *err)
{
	(void)device;
	(void)err;
	*fence = (struct device_fence){ .handle = NULL };
	return 0;
}

static void host_fence_close(struct pen_device *device, struct device_fence *fence)
{
	(void)device;
	(void)fence;
}

static int host_fence_behind(struct pen_device *device, void *callers_stream,
			     struct device_fence *fence, struct pen_error *err)
{
	(void)callers_stream;
	return host_fence_open(device, fence, err);
}

static int host_wait(struct pen_device *device, struct device_stream *stream,
		     const struct device_fence *fence, struct pen_error *err)
{
	(void)device;
	(void)stream;
	(void)fence;
	(void)err;
	return 0;
}

static int host_copy(struct pen_device *device, struct device_stream *stream,
		     const struct device_copy *copy, struct pen_error *err)
{
	(void)device;
	(void)stream;
	(void)err;
	for (size_t row = 0; row < copy->rows; row++) {
		unsigned char *memory = copy->memory + row * copy->memory_pitch;
		unsigned char *host = copy->host + row * copy->host_pitch;

		if (copy->form)
			copy->form->apply(memory, host, copy->width / copy->form->from_size);
		else if (copy->to_device)
			memcpy(memory, host, copy->width);
		else
			memcpy(host, memory, copy->width);
	}
	return 0;
}

static int host_decode(struct pen_device *device, struct device_stream *stream,
		       const struct coding_part *part, unsigned int mark,
		       struct device_fence *fence, struct pen_error *err)
{
	(void)stream;
	(void)part;
	(void)mark;
	(void)fence;
	return error_set(err, -ENOTSUP, "start a kernel on", device->name, -1,
			 "there are only cores");
}

static int host_mark(struct pen_device *device, struct device_stream *stream,
		     struct device_fence *fence, struct pen_error *err)
{
	(void)device;
	(void)stream;
	(void)fence;
	(void)err;
	return 0;
}

static int host_poll(struct pen_device *device, struct device_fence *fence, struct pen_error *err)
{
	(void)device;
	(void)fence;
	(void)err;
	return 0;
}

static void host_close(struct pen_device *device)
{
	(void)device;
}

const struct device_ops device_host_ops = {
	.kind = "host",
	.open = host_open,
	.ready = host_nothing,
	.poll_ready = host_nothing,
	.enter = host_nothing,
	.alloc = host_alloc,
	.free = host_free,
	.get = host_get,
	.put = host_put,
	.pin = host_pin,
	.unpin = host_unpin,
	.stream_open = host_stream_open,
	.stream_drain = host_stream_drain,
	.stream_close = host_stream_close,
	.fence_open = host_fence_open,
	.fence_close = host_fence_close,
	.fence_behind = host_fence_behind,
	.wait = host_wait,
	.copy = host_copy,
	.decode = host_decode,
	.mark = host_mark,
	.poll = host_poll,
	.close = host_close,
};

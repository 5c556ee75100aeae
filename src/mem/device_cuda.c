/* SPDX-License-Identifier: MIT */
/*
 * One GPU as a device, through the driver API. The primary context is retained, so it is the one
 * torch uses. It comes up on a thread of its own while lanes read ahead:
 *
 *   STARTING --start_context--> READY | BROKEN      (the words of BROKEN are kept)
 *
 * Invariants
 *   1. `status` is written once by the starting thread, with release; who has seen it not 0 may
 *      read everything else without a lock.
 *   2. Calls made for the user's thread push our context and pop it again; lanes set it for good.
 *   3. The context is retained exactly while the device is open and READY.
 *   4. Streams and events are kept from job to job: making one costs the driver's own lock, which
 *      all lanes want when a job starts. An idle stream is empty, and no error has met it.
 *   5. Kernels are loaded when the first is needed. What may pass, like a lack of memory, is said
 *      and tried again; what cannot is kept in `kernels`.
 *   6. A verdict is a word of the host's memory that kernels may write to, for a fence that has
 *      ever needed one. They lie together, in pages that a child does not inherit, pinned when
 *      kernels are loaded; those that no fence has are 0.
 *   7. In a forked child nothing here calls the driver: ready() and poll_ready() say why, and all
 *      else comes after them.
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include "base/error.h"
#include "kernels/image.h"
#include "mem/device.h"
#include "sys/cuda.h"
#include "sys/os.h"
#include "sys/topology.h"

enum { STARTING, READY, BROKEN };

/* A block of a kernel: threads, and bytes that all of them read at once (see kernels/convert.cu).
 * Rows that are narrow have small blocks. */
#define BLOCK_THREADS 256u
#define BLOCK_THREADS_NARROW 32u
#define WARP_THREADS 32u
#define THREAD_BYTES 32u
#define GRID_ROWS_MAX 65535u
/* Most bytes of a row in one launch; kernels count in 32 bits. */
#define LAUNCH_WIDTH ((size_t)256 << 20)
/* Verdicts, a word each: as many as the fences of all lanes of the largest job. */
#define VERDICTS 4096u
#define VERDICT_BYTES (VERDICTS * sizeof(unsigned int))

/* Handles that nobody uses now; what is too much is given back to the driver. */
struct idle {
	void *handles[1024];
	unsigned int count;
};

struct cuda_state {
	const struct cuda_api *api;
	cuda_device device;
	void *context;
	pthread_t starter;
	pthread_mutex_t join_lock;	/* guards joined */
	bool joined;
	atomic_int status;
	struct pen_error error;		/* why BROKEN */
	pthread_mutex_t idle_lock;	/* guards the two below */
	struct idle streams, events;
	pthread_mutex_t kernel_lock;	/* held by who loads them */
	atomic_int kernels;		/* STARTING: not to be had yet; READY: all that follows is
					   set by then; BROKEN: the error says why */
	struct pen_error no_kernels;
	void *module;
	void *functions[PEN_FORMS];
	void *decoders[CODING_KERNELS];
	unsigned int *verdicts;		/* pinned; or NULL */
	uint64_t verdicts_taken[VERDICTS / 64];	/* a bit for each; guarded by idle_lock */
};

static struct cuda_state *state_of(struct pen_device *device)
{
	return device->state;
}

static int fail(struct pen_device *device, cuda_result result, const char *operation,
		struct pen_error *err)
{
	return cuda_error(state_of(device)->api, result, operation, device->name, err);
}

static int bring_up(struct pen_device *device, struct pen_error *err)
{
	struct cuda_state *state = state_of(device);
	const struct cuda_api *api = state->api;
	char bus_id[32] = "";
	cuda_result result;
	int count = 0, maps = 0;

	result = cuda_start(api);
	if (result)
		return fail(device, result, "start the driver for", err);
	result = CUDA(api, cuDeviceGetCount, &count);
	if (result)
		return fail(device, result, "count the GPUs for", err);
	if (device->index >= count) {
		error_set(err, -ENODEV, "open device", device->name, -1,
			  "this machine has %d GPU%s", count, count == 1 ? "" : "s");
		if (count)
			error_hint(err, "Use cuda:0%s", count > 1 ? " or a higher number" : "");
		return -ENODEV;
	}
	result = CUDA(api, cuDeviceGet, &state->device, device->index);
	if (result)
		return fail(device, result, "open", err);
	if (device_node(device) == NODE_PENDING &&
	    !CUDA(api, cuDeviceGetPCIBusId, bus_id, sizeof(bus_id), state->device))
		device->node = topology_pci_node(bus_id);
	result = CUDA(api, cuDevicePrimaryCtxRetain, &state->context, state->device);
	if (result)
		return fail(device, result, "create a context on", err);
	if (!CUDA(api, cuDeviceGetAttribute, &maps, CUDA_ATTRIBUTE_READ_ONLY_REGISTER,
		  state->device))
		device->maps = maps != 0;
	return 0;
}

static void *start_context(void *argument)
{
	struct pen_device *device = argument;
	struct cuda_state *state = state_of(device);
	int rc = bring_up(device, &state->error);

	/* Nobody may wait for a node that will not be known. */
	if (device_node(device) == NODE_PENDING)
		device->node = -1;
	atomic_store_explicit(&state->status, rc ? BROKEN : READY, memory_order_release);
	return NULL;
}

static int gpu_open(struct pen_device *device, struct pen_error *err)
{
	const struct cuda_api *api = cuda_open(err);
	struct cuda_state *state;
	int rc;

	if (!api)
		return err ? err->code : -ENODEV;
	rc = cuda_forked(device->name, err);
	if (rc)
		return rc;
	state = os_calloc(1, sizeof(*state));
	if (!state)
		return error_sys(err, -ENOMEM, "open device", device->name, -1);
	state->api = api;
	pthread_mutex_init(&state->join_lock, NULL);
	pthread_mutex_init(&state->idle_lock, NULL);
	pthread_mutex_init(&state->kernel_lock, NULL);
	device->state = state;
	device->node = topology_nodes() > 1 ? NODE_PENDING : -1;
	rc = os_thread_start(&state->starter, start_context, device);
	if (rc) {
		pthread_mutex_destroy(&state->kernel_lock);
		pthread_mutex_destroy(&state->idle_lock);
		pthread_mutex_destroy(&state->join_lock);
		free(state);
		return error_sys(err, rc, "start a thread for", device->name, -1);
	}
	return 0;
}

static int gpu_poll_ready(struct pen_device *device, struct pen_error *err)
{
	struct cuda_state *state = state_of(device);

	if (device_inherited(device))
		return cuda_say_forked(device->name, err);
	switch (atomic_load_explicit(&state->status, memory_order_acquire)) {
	case STARTING:
		return -EAGAIN;
	case READY:
		return 0;
	}
	if (err)
		*err = state->error;
	return state->error.code;
}

/* Wait for the starting thread; in the process that has it. */
static void join_starter(struct cuda_state *state)
{
	pthread_mutex_lock(&state->join_lock);
	if (!state->joined)
		pthread_join(state->starter, NULL);
	state->joined = true;
	pthread_mutex_unlock(&state->join_lock);
}

static int gpu_ready(struct pen_device *device, struct pen_error *err)
{
	int rc = gpu_poll_ready(device, err);

	if (rc != -EAGAIN)
		return rc;
	join_starter(state_of(device));
	return gpu_poll_ready(device, err);
}

static int gpu_enter(struct pen_device *device, struct pen_error *err)
{
	struct cuda_state *state = state_of(device);
	cuda_result result = CUDA(state->api, cuCtxSetCurrent, state->context);

	return result ? fail(device, result, "make a context current on", err) : 0;
}

/* For the user's threads: make the context current, and put back what was. */
static int push(struct pen_device *device, struct pen_error *err)
{
	struct cuda_state *state = state_of(device);
	cuda_result result;
	int rc = gpu_ready(device, err);

	if (rc)
		return rc;
	result = CUDA(state->api, cuCtxPushCurrent_v2, state->context);
	return result ? fail(device, result, "make a context current on", err) : 0;
}

static void pop(struct pen_device *device)
{
	void *context;

	state_of(device)->api->cuCtxPopCurrent_v2(&context);
}

static int gpu_alloc(struct pen_device *device, uint64_t size, void **memory,
		     struct pen_error *err)
{
	struct cuda_state *state = state_of(device);
	cuda_pointer pointer = 0;
	size_t free_bytes = 0, total = 0;
	cuda_result result;
	int rc = push(device, err);

	if (rc)
		return rc;
	result = CUDA(state->api, cuMemAlloc_v2, &pointer, size);
	if (result) {
		rc = fail(device, result, "allocate memory on", err);
		if (result == CUDA_OUT_OF_MEMORY &&
		    !state->api->cuMemGetInfo_v2(&free_bytes, &total))
			error_hint(err, "%llu bytes were asked for, %zu of %zu are free",
				   (unsigned long long)size, free_bytes, total);
	}
	*memory = (void *)(uintptr_t)pointer;
	pop(device);
	return rc;
}

static int gpu_free(struct pen_device *device, void *memory, uint64_t size, struct pen_error *err)
{
	cuda_result result;
	int rc = push(device, err);

	(void)size;
	if (rc)
		return rc;
	result = CUDA(state_of(device)->api, cuMemFree_v2, (cuda_pointer)(uintptr_t)memory);
	if (result)
		rc = fail(device, result, "free memory on", err);
	pop(device);
	return rc;
}

static int gpu_get(struct pen_device *device, void *host, const void *memory, uint64_t size,
		   struct pen_error *err)
{
	cuda_result result;
	int rc = push(device, err);

	if (rc)
		return rc;
	result = CUDA(state_of(device)->api, cuMemcpyDtoH_v2, host,
		      (cuda_pointer)(uintptr_t)memory, size);
	if (result)
		rc = fail(device, result, "copy from", err);
	pop(device);
	return rc;
}

static int gpu_put(struct pen_device *device, void *memory, const void *host, uint64_t size,
		   struct pen_error *err)
{
	cuda_result result;
	int rc = push(device, err);

	if (rc)
		return rc;
	result = CUDA(state_of(device)->api, cuMemcpyHtoD_v2, (cuda_pointer)(uintptr_t)memory,
		      host, size);
	/* It returns when it has read the host's bytes; our streams would not wait for the rest. */
	if (!result)
		result = CUDA(state_of(device)->api, cuStreamSynchronize, CUDA_STREAM_LEGACY);
	if (result)
		rc = fail(device, result, "copy to", err);
	pop(device);
	return rc;
}

static int gpu_pin(struct pen_device *device, void *host, size_t size, bool read_only,
		   struct pen_error *err)
{
	unsigned int flags = CUDA_REGISTER_PORTABLE |
			     CUDA_REGISTER_DEVICEMAP |
			     (read_only ? CUDA_REGISTER_READ_ONLY : 0);
	cuda_result result =
		CUDA(state_of(device)->api, cuMemHostRegister_v2, host, size, flags);

	if (!result)
		return 0;
	fail(device, result, "register memory with", err);
	if (result == CUDA_OUT_OF_MEMORY)
		error_hint(err, "Raise the limit of locked memory (ulimit -l) or lower the memory "
				"limit");
	return err ? err->code : -EIO;
}

static int gpu_unpin(struct pen_device *device, void *host, struct pen_error *err)
{
	cuda_result result;
	/* Pooled memory is unpinned by whoever closes the device, on a thread of the user's. */
	int rc = push(device, err);

	if (rc)
		return rc;
	result = CUDA(state_of(device)->api, cuMemHostUnregister, host);
	if (result)
		rc = fail(device, result, "unregister memory from", err);
	pop(device);
	return rc;
}

static void *idle_take(struct cuda_state *state, struct idle *idle)
{
	void *handle;

	pthread_mutex_lock(&state->idle_lock);
	handle = idle->count ? idle->handles[--idle->count] : NULL;
	pthread_mutex_unlock(&state->idle_lock);
	return handle;
}

static bool idle_keep(struct cuda_state *state, struct idle *idle, void *handle)
{
	bool room;

	pthread_mutex_lock(&state->idle_lock);
	room = idle->count < sizeof(idle->handles) / sizeof(idle->handles[0]);
	if (room)
		idle->handles[idle->count++] = handle;
	pthread_mutex_unlock(&state->idle_lock);
	return room;
}

/* The fence's event, made when it is first needed: most of a lane's fences never are. */
static int need_event(struct pen_device *device, struct device_fence *fence, struct pen_error *err)
{
	struct cuda_state *state = state_of(device);
	cuda_result result;

	if (!fence->handle)
		fence->handle = idle_take(state, &state->events);
	if (fence->handle)
		return 0;
	result = CUDA(state->api, cuEventCreate, &fence->handle, CUDA_EVENT_NO_TIMING);
	if (!result)
		return 0;
	fence->handle = NULL;
	return fail(device, result, "create an event on", err);
}

static int gpu_fence_open(struct pen_device *device, struct device_fence *fence,
			  struct pen_error *err)
{
	(void)device;
	(void)err;
	*fence = (struct device_fence){ .handle = NULL };
	return 0;
}

/* A verdict for the fence, if it has none; false: there are no more. */
static bool need_verdict(struct cuda_state *state, struct device_fence *fence)
{
	/* It is asked for with each launch, by all lanes. */
	if (fence->verdict)
		return true;
	pthread_mutex_lock(&state->idle_lock);
	for (size_t i = 0; i < VERDICTS / 64 && !fence->verdict; i++) {
		unsigned int bit;

		if (!~state->verdicts_taken[i])
			continue;
		bit = (unsigned int)__builtin_ctzll(~state->verdicts_taken[i]);
		state->verdicts_taken[i] |= 1ull << bit;
		fence->verdict = &state->verdicts[i * 64 + bit];
	}
	pthread_mutex_unlock(&state->idle_lock);
	return fence->verdict;
}

static void give_verdict(struct cuda_state *state, struct device_fence *fence)
{
	size_t number = (size_t)(fence->verdict - state->verdicts);

	*fence->verdict = 0;
	fence->verdict = NULL;
	pthread_mutex_lock(&state->idle_lock);
	state->verdicts_taken[number / 64] &= ~(1ull << number % 64);
	pthread_mutex_unlock(&state->idle_lock);
}

static void gpu_fence_close(struct pen_device *device, struct device_fence *fence)
{
	struct cuda_state *state = state_of(device);
	void *event = fence->handle;

	fence->handle = NULL;
	/* In a forked child nothing of it is ours, and a thread of the parent may hold the lock. */
	if (device_inherited(device))
		return;
	if (fence->verdict)
		give_verdict(state, fence);
	if (!event || idle_keep(state, &state->events, event) || push(device, NULL))
		return;
	state->api->cuEventDestroy_v2(event);
	pop(device);
}

static int record(struct pen_device *device, struct device_fence *fence, void *stream,
		  struct pen_error *err)
{
	cuda_result result;
	int rc = need_event(device, fence, err);

	if (rc)
		return rc;
	result = CUDA(state_of(device)->api, cuEventRecord, fence->handle, stream);
	return result ? fail(device, result, "record an event on", err) : 0;
}

static int gpu_mark(struct pen_device *device, struct device_stream *stream,
		    struct device_fence *fence, struct pen_error *err)
{
	return record(device, fence, stream->handle, err);
}

static int gpu_fence_behind(struct pen_device *device, void *callers_stream,
			    struct device_fence *fence, struct pen_error *err)
{
	int rc = push(device, err);

	*fence = (struct device_fence){ .handle = NULL };
	if (rc)
		return rc;
	rc = record(device, fence, callers_stream, err);
	pop(device);
	if (rc)
		gpu_fence_close(device, fence);
	return rc;
}

static int gpu_wait(struct pen_device *device, struct device_stream *stream,
		    const struct device_fence *fence, struct pen_error *err)
{
	cuda_result result;

	if (!fence->handle)
		return 0;
	result = CUDA(state_of(device)->api, cuStreamWaitEvent, stream->handle, fence->handle, 0);
	return result ? fail(device, result, "order after the caller's stream on", err) : 0;
}

static int gpu_poll(struct pen_device *device, struct device_fence *fence, struct pen_error *err)
{
	cuda_result result;

	if (!fence->handle)
		return 0;
	result = CUDA(state_of(device)->api, cuEventQuery, fence->handle);
	if (!result)
		return 0;
	if (result == CUDA_NOT_READY)
		return -EAGAIN;
	return fail(device, result, "finish a copy on", err);
}

static void gpu_stream_drain(struct pen_device *device, struct device_stream *stream)
{
	state_of(device)->api->cuStreamSynchronize(stream->handle);
}

static void gpu_stream_close(struct pen_device *device, struct device_stream *stream)
{
	struct cuda_state *state = state_of(device);
	void *handle = stream->handle;

	stream->handle = NULL;
	if (!handle || (!state->api->cuStreamSynchronize(handle) && !stream->lent &&
			idle_keep(state, &state->streams, handle)))
		return;
	state->api->cuStreamDestroy_v2(handle);
}

/* They must not wait for the legacy default stream, nor it for them: hence "non-blocking". */
static int gpu_stream_open(struct pen_device *device, struct device_stream *stream,
			   struct pen_error *err)
{
	struct cuda_state *state = state_of(device);
	cuda_result result = 0;

	stream->lent = false;
	stream->handle = idle_take(state, &state->streams);
	if (!stream->handle)
		result = CUDA(state->api, cuStreamCreate, &stream->handle,
			      CUDA_STREAM_NON_BLOCKING);
	if (!result)
		return 0;
	stream->handle = NULL;
	return fail(device, result, "create a stream on", err);
}

static cuda_result copy_rows(const struct cuda_api *api, const struct device_copy *copy,
			     void *stream)
{
	struct cuda_copy_2d rows = { .width = copy->width, .height = copy->rows };
	cuda_pointer memory = (cuda_pointer)(uintptr_t)copy->memory;

	if (copy->to_device) {
		rows.src_type = CUDA_MEMORY_HOST;
		rows.src_host = copy->host;
		rows.src_pitch = copy->host_pitch;
		rows.dst_type = CUDA_MEMORY_DEVICE;
		rows.dst_device = memory;
		rows.dst_pitch = copy->memory_pitch;
	} else {
		rows.src_type = CUDA_MEMORY_DEVICE;
		rows.src_device = memory;
		rows.src_pitch = copy->memory_pitch;
		rows.dst_type = CUDA_MEMORY_HOST;
		rows.dst_host = copy->host;
		rows.dst_pitch = copy->host_pitch;
	}
	return CUDA(api, cuMemcpy2DAsync_v2, &rows, stream);
}

/* -------------------------------------------------------------------------------- kernels -- */

/* Is it the machine that says no, for good, and not the moment? */
static bool stays_so(cuda_result result)
{
	switch (result) {
	case CUDA_INVALID_IMAGE:
	case CUDA_NO_BINARY:
	case CUDA_INVALID_PTX:
	case CUDA_NO_PTX_COMPILER:
	case CUDA_UNSUPPORTED_PTX:
	case CUDA_PTX_DISABLED:
	case CUDA_NOT_FOUND:
	case CUDA_NOT_SUPPORTED:
		return true;
	default:
		return false;
	}
}

/* What a driver says no to, a core can do. */
static int no_kernels(struct pen_device *device, cuda_result result, const char *operation,
		      bool *for_good, struct pen_error *err)
{
	*for_good = stays_so(result);
	fail(device, result, operation, err);
	return err->code = -ENOTSUP;
}

/* By whoever loads the kernels, with the context current. */
static int make_verdicts(struct pen_device *device, struct pen_error *err)
{
	struct cuda_state *state = state_of(device);
	void *memory;
	int rc = os_map_huge(VERDICT_BYTES, device_node(device), &memory);

	if (rc) {
		error_sys(err, rc, "make verdicts for", device->name, -1);
		return err->code = -ENOTSUP;
	}
	/* A damaged chunk would go unseen if a fork left the GPU with other pages than ours. */
	os_not_inherited(memory, VERDICT_BYTES);
	if (device_pin(device, memory, VERDICT_BYTES, false, err)) {
		os_unmap(memory, VERDICT_BYTES);
		return err->code = -ENOTSUP;
	}
	state->verdicts = memory;
	return 0;
}

static int find_kernels(struct pen_device *device, bool *for_good, struct pen_error *err)
{
	struct cuda_state *state = state_of(device);
	const struct cuda_api *api = state->api;
	cuda_result result = 0;

	for (uint64_t i = 1; i < PEN_FORMS && !result; i++)
		result = CUDA(api, cuModuleGetFunction, &state->functions[i], state->module,
			      form_of(i)->kernel);
	for (unsigned int i = 0; i < CODING_KERNELS && !result; i++)
		result = CUDA(api, cuModuleGetFunction, &state->decoders[i], state->module,
			      coding_kernels[i].name);
	return result ? no_kernels(device, result, "find a kernel on", for_good, err)
		      : make_verdicts(device, err);
}

/* -ENOTSUP with words; `for_good` where there is no use in trying again. */
static int load_kernels(struct pen_device *device, bool *for_good, struct pen_error *err)
{
	struct cuda_state *state = state_of(device);
	const struct cuda_api *api = state->api;
	int same = 0, rc;
	cuda_result result;

	*for_good = true;
	if (!api->cuModuleLoadData || !api->cuModuleUnload || !api->cuModuleGetFunction ||
	    !api->cuLaunchKernel)
		return error_set(err, -ENOTSUP, "load kernels on", device->name, -1,
				 "the driver starts no kernels");
	result = CUDA(api, cuDeviceGetAttribute, &same, CUDA_ATTRIBUTE_HOST_POINTERS,
		      state->device);
	*for_good = !result;
	if (result || !same)
		return error_set(err, -ENOTSUP, "load kernels on", device->name, -1,
				 "this GPU does not read the host's memory by itself");
	*for_good = false;
	result = CUDA(api, cuModuleLoadData, &state->module, kernels_image);
	if (result) {
		state->module = NULL;
		return no_kernels(device, result, "load kernels on", for_good, err);
	}
	rc = find_kernels(device, for_good, err);
	if (rc) {
		api->cuModuleUnload(state->module);
		state->module = NULL;
	}
	return rc;
}

/* Under the lock: they are not there yet. */
static int try_kernels(struct pen_device *device, struct pen_error *err)
{
	struct cuda_state *state = state_of(device);
	bool for_good;
	int rc = load_kernels(device, &for_good, err);

	if (!rc) {
		atomic_store(&state->kernels, READY);
	} else if (for_good) {
		state->no_kernels = *err;
		atomic_store(&device->no_kernels, true);
		atomic_store(&state->kernels, BROKEN);
	}
	return rc;
}

/* Are there kernels? -ENOTSUP with words where not. */
static int need_kernels(struct pen_device *device, struct pen_error *err)
{
	struct cuda_state *state = state_of(device);
	int rc = 0;

	if (atomic_load_explicit(&state->kernels, memory_order_acquire) == READY)
		return 0;
	pthread_mutex_lock(&state->kernel_lock);
	if (atomic_load(&state->kernels) == STARTING) {
		rc = try_kernels(device, err);
	} else if (atomic_load(&state->kernels) == BROKEN) {
		*err = state->no_kernels;
		rc = err->code;
	}
	pthread_mutex_unlock(&state->kernel_lock);
	return rc;
}

/* Others may have been queued before: so it is never -ENOTSUP, after which a core would begin. */
static int launch_failed(struct pen_device *device, cuda_result result, struct pen_error *err)
{
	fail(device, result, "start a kernel on", err);
	return err->code = -EIO;
}

/* One launch: `width` bytes of each row, from `at` on. */
static cuda_result launch_part(const struct cuda_api *api, void *function,
			       const struct device_copy *copy, size_t at, size_t width,
			       void *stream)
{
	unsigned char *to = copy->memory + form_bytes(copy->form, at), *from = copy->host + at;
	int numbers = (int)(width / copy->form->from_size);
	unsigned long long rows = copy->rows, to_pitch = copy->memory_pitch,
			   from_pitch = copy->host_pitch;
	void *arguments[] = { &to, &from, &numbers, &rows, &to_pitch, &from_pitch };
	unsigned int threads = width <= BLOCK_THREADS_NARROW * THREAD_BYTES ? BLOCK_THREADS_NARROW
									    : BLOCK_THREADS;
	/* A row begins somewhere in a line of its block. */
	size_t blocks = (width + 127) / ((size_t)threads * THREAD_BYTES) + 1;
	unsigned int lines = rows < GRID_ROWS_MAX ? (unsigned int)rows : GRID_ROWS_MAX;

	return CUDA(api, cuLaunchKernel, function, (unsigned int)blocks, lines, 1, threads, 1, 1,
		    0, stream, arguments, NULL);
}

static int launch(struct pen_device *device, struct device_stream *stream,
		  const struct device_copy *copy, struct pen_error *err)
{
	void *function;
	cuda_result result = 0;
	size_t width;
	int rc = need_kernels(device, err);

	if (rc)
		return rc;
	function = state_of(device)->functions[form_number(copy->form)];
	for (size_t at = 0; at < copy->width && !result; at += width) {
		width = copy->width - at < LAUNCH_WIDTH ? copy->width - at : LAUNCH_WIDTH;
		result = launch_part(state_of(device)->api, function, copy, at, width,
				     stream->handle);
	}
	return result ? launch_failed(device, result, err) : 0;
}

/* A block for each chunk, of one warp. */
static int gpu_decode(struct pen_device *device, struct device_stream *stream,
		      const struct coding_part *part, unsigned int mark,
		      struct device_fence *fence, struct pen_error *err)
{
	struct cuda_state *state = state_of(device);
	struct decode_launch launch;
	void *arguments[] = { &launch };
	cuda_result result = 0;
	int rc = need_kernels(device, err);

	if (rc)
		return rc;
	if (!need_verdict(state, fence))
		return error_set(err, -ENOTSUP, "start a kernel on", device->name, -1,
				 "too many transfers decode at the same time");
	for (uint64_t done = 0; done < part->count && !result; done += launch.count) {
		coding_launch(part, done, &launch);
		launch.verdict = fence->verdict;
		launch.mark = mark + (unsigned int)done;
		result = CUDA(state->api, cuLaunchKernel,
			      state->decoders[coding_kernel(part->coding)], launch.count, 1, 1,
			      WARP_THREADS, 1, 1, 0, stream->handle, arguments, NULL);
	}
	return result ? launch_failed(device, result, err) : 0;
}

static int gpu_copy(struct pen_device *device, struct device_stream *stream,
		    const struct device_copy *copy, struct pen_error *err)
{
	const struct cuda_api *api = state_of(device)->api;
	cuda_pointer memory = (cuda_pointer)(uintptr_t)copy->memory;
	cuda_result result;

	if (copy->form)
		return launch(device, stream, copy, err);
	if (copy->rows > 1)
		result = copy_rows(api, copy, stream->handle);
	else if (copy->to_device)
		result = CUDA(api, cuMemcpyHtoDAsync_v2, memory, copy->host, copy->width,
			      stream->handle);
	else
		result = CUDA(api, cuMemcpyDtoHAsync_v2, copy->host, memory, copy->width,
			      stream->handle);
	return result ? fail(device, result, copy->to_device ? "copy to" : "copy from", err) : 0;
}

/* What is idle goes back to the driver while the context is still there. */
static void empty_idle(struct pen_device *device)
{
	struct cuda_state *state = state_of(device);

	if (push(device, NULL))
		return;
	while (state->streams.count)
		state->api->cuStreamDestroy_v2(state->streams.handles[--state->streams.count]);
	while (state->events.count)
		state->api->cuEventDestroy_v2(state->events.handles[--state->events.count]);
	if (state->module)
		state->api->cuModuleUnload(state->module);
	if (state->verdicts) {
		state->api->cuMemHostUnregister(state->verdicts);
		os_unmap(state->verdicts, VERDICT_BYTES);
	}
	pop(device);
}

static void gpu_close(struct pen_device *device)
{
	struct cuda_state *state = state_of(device);

	join_starter(state);
	if (!gpu_poll_ready(device, NULL)) {
		empty_idle(device);
		state->api->cuDevicePrimaryCtxRelease_v2(state->device);
	}
	pthread_mutex_destroy(&state->kernel_lock);
	pthread_mutex_destroy(&state->idle_lock);
	pthread_mutex_destroy(&state->join_lock);
	free(state);
}

const struct device_ops device_cuda_ops = {
	.kind = "cuda",
	.open = gpu_open,
	.ready = gpu_ready,
	.poll_ready = gpu_poll_ready,
	.enter = gpu_enter,
	.alloc = gpu_alloc,
	.free = gpu_free,
	.get = gpu_get,
	.put = gpu_put,
	.pin = gpu_pin,
	.unpin = gpu_unpin,
	.stream_open = gpu_stream_open,
	.stream_drain = gpu_stream_drain,
	.stream_close = gpu_stream_close,
	.fence_open = gpu_fence_open,
	.fence_close = gpu_fence_close,
	.fence_behind = gpu_fence_behind,
	.wait = gpu_wait,
	.copy = gpu_copy,
	.decode = gpu_decode,
	.mark = gpu_mark,
	.poll = gpu_poll,
	.close = gpu_close,
};

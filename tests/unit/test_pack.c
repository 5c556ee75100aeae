/* SPDX-License-Identifier: MIT */
/*
 * The packer with a source of our own: we are asked for every byte that it reads, and whether the
 * file has changed, which is between the writing of a packed file and its verification. So we can
 * look, spoil or stop at a moment of our choice.
 */
#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include "base/error.h"
#include "format/model.h"
#include "format/pack.h"
#include "io/object.h"
#include "penstock.h"
#include "scratch.h"

#define VALUES 70000u	/* more than four chunks */

struct source {
	struct pen_object *from, *to;
	struct pen_pack *pack;
	/* Called before the first byte is read, or NULL. */
	void (*meanwhile)(struct source *source);
	atomic_bool may_read;
	int fails;		/* what reading it gives */
	uint64_t seen;		/* bytes that it had done */
	int64_t spoil;		/* the byte of the packed file that is to change; -1: none */
	int64_t written;	/* its size */
};

static int read_source(void *context, void *buffer, uint64_t length, uint64_t offset,
		       struct pen_error *err)
{
	struct source *source = context;
	struct pen_progress progress;

	while (!source->may_read)
		sched_yield();
	pen_pack_poll(source->pack, &progress);
	CHECK(progress.bytes >= source->seen && progress.bytes <= progress.total);
	source->seen = progress.bytes;
	if (source->fails)
		return error_sys(err, source->fails, "read", "the source", -1);
	return object_read(source->from, buffer, (size_t)length, offset, err);
}

static int spoil(void *context, struct pen_error *err)
{
	struct source *source = context;
	unsigned char byte;

	(void)err;
	source->written = lseek(source->to->fd, 0, SEEK_END);
	if (source->spoil < 0)
		return 0;
	CHECK(pread(source->to->fd, &byte, 1, source->spoil) == 1);
	byte ^= 1;
	CHECK(pwrite(source->to->fd, &byte, 1, source->spoil) == 1);
	return 0;
}

/* A file of weights that can be coded, or of chance alone. */
static void make_original(bool chance)
{
	static const uint64_t shape[] = { VALUES }, few[] = { 10 };
	static uint16_t weights[VALUES];
	static float plain[10] = { 1, 2, 3 };
	struct pen_save_tensor tensors[] = {
		{ .name = "weights", .dtype = PEN_BF16, .rank = 1, .shape = shape,
		  .memory = weights },
		{ .name = "plain", .dtype = PEN_F32, .rank = 1, .shape = few, .memory = plain },
	};
	struct pen_save *save;
	struct pen_error err;
	uint64_t seed = 7;

	for (uint32_t i = 0; i < VALUES; i++) {
		seed = seed * 6364136223846793005ull + 1442695040888963407ull;
		weights[i] = chance ? (uint16_t)(seed >> 48)
				    : (uint16_t)(((seed >> 32) & 0x807f) | 0x3c00);
	}
	CHECK(!pen_save_start(in_scratch("original.safetensors"), tensors, 2, NULL, &save, &err));
	CHECK(!pen_save_wait(save, NULL, &err));
}

/* Pack it and throw it away. */
static int pack(struct source *source, struct pen_packed *packed, struct pen_error *err)
{
	const char *path = in_scratch("original.safetensors");
	struct pen_pack_options options = PEN_PACK_OPTIONS_INIT;
	struct pack_file file = { .doing = "pack", .name = path, .read = read_source,
				  .unchanged = spoil, .source = source };
	struct pen_model *model;
	struct pen_pack *pack;
	int rc;

	options.verify = 1;
	options.threads = 1;	/* one who looks at a time */
	CHECK(!pen_model_open(path, &model, err));
	CHECK(!pen_object_open(in_scratch("packed.safetensors"), PEN_WRITE, 0, &source->to, err));
	source->from = model->files[0].object;
	file.size = model->files[0].size;
	file.table = model->tables[0];
	file.to = source->to;
	CHECK(!pack_start(PACK, &file, 1, &options, &pack, err));
	source->pack = pack;
	if (source->meanwhile)
		source->meanwhile(source);
	source->may_read = true;
	rc = pen_pack_wait(pack, packed, err);
	pen_object_close(source->to);
	pen_model_close(model);
	return rc;
}

/* Any byte of the header, of the table of chunks and of the chunks; a later one every time. */
static int64_t next_byte(int64_t byte, int64_t front)
{
	return byte + (byte < front ? 61 : 4001);
}

static void spoil_everywhere(bool chance)
{
	struct source source = { .spoil = -1 };
	struct pen_packed packed = PEN_PACKED_INIT;
	struct pen_error err;
	int64_t size;
	unsigned int spoilt = 0;

	make_original(chance);
	CHECK(!pack(&source, &packed, &err));
	CHECK(packed.coded == !chance && packed.kinds[PEN_BF16].tensors == 1);
	CHECK(packed.stored == (uint64_t)source.written);
	size = source.written;
	for (int64_t byte = 0; byte < size; byte = next_byte(byte, 5000)) {
		source = (struct source){ .spoil = byte };
		CHECK(pack(&source, NULL, &err) < 0);
		CHECK(strstr(err.object, "packed.safetensors") && strstr(err.hint, "try again"));
		spoilt++;
	}
	CHECK(spoilt > 30);
}

TEST(verifying_reads_all_that_was_written_header_and_table_too)
{
	spoil_everywhere(false);
}

TEST(verifying_reads_a_file_that_was_only_copied)
{
	spoil_everywhere(true);
}

TEST(bytes_that_are_done_never_become_fewer)
{
	struct source source = { .spoil = -1 };
	struct pen_packed packed = PEN_PACKED_INIT;
	struct pen_error err;

	/* It is coded in vain, and then copied. */
	make_original(true);
	CHECK(!pack(&source, &packed, &err) && !packed.coded);
	CHECK(source.seen > 2 * VALUES);
}

static void ask_in_a_child(struct source *source)
{
	struct pen_progress progress;
	struct pen_error err;
	int status = -1;
	pid_t pid;

	fflush(NULL);
	pid = fork();
	if (!pid) {
		pen_pack_poll(source->pack, &progress);
		CHECK(progress.state == PEN_FAILED);
		CHECK(pen_pack_wait_for(source->pack, 1) == 0);
		CHECK(pen_pack_wait(source->pack, NULL, &err) == -ECHILD && err.hint[0]);
		_exit(0);
	}
	CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status));
	CHECK(!WEXITSTATUS(status));
}

TEST(a_child_of_fork_does_not_wait_for_threads_that_it_has_not)
{
	struct source source = { .spoil = -1, .meanwhile = ask_in_a_child };
	struct pen_error err;

	make_original(false);
	CHECK(!pack(&source, NULL, &err));
}

TEST(a_store_that_fails_as_if_it_was_cancelled_fails_the_packing)
{
	struct source source = { .spoil = -1, .fails = -ECANCELED };
	struct pen_error err;

	make_original(false);
	CHECK(pack(&source, NULL, &err) == -ECANCELED);
	CHECK(!strcmp(err.object, "the source"));
}

TEST_MAIN

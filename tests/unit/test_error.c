/* SPDX-License-Identifier: MIT */
/* The error record: filled once at the place that knows, one readable line for people. */
#include <errno.h>
#include "base/error.h"
#include "test.h"

TEST(a_system_error_has_the_words_of_the_system)
{
	struct pen_error err;

	CHECK_EQ(error_sys(&err, -ENOENT, "open", "/a/b", -1), -ENOENT);
	CHECK_EQ(err.code, -ENOENT);
	CHECK_EQ(err.raw, ENOENT);
	CHECK_EQ(err.domain, PEN_DOMAIN_ERRNO);
	CHECK_EQ(err.offset, -1);
	CHECK_TEXT(err.operation, "open");
	CHECK_TEXT(err.object, "/a/b");
	CHECK_TEXT(err.message, "No such file or directory");
	CHECK_TEXT(err.hint, "");
}

TEST(a_line_says_what_where_why_and_what_to_do)
{
	struct pen_error err;
	char text[300];

	error_set(&err, -EIO, "read", "disk", 4096, "it is %s", "broken");
	error_hint(&err, "Buy another");
	CHECK_EQ(pen_error_format(&err, text, sizeof(text)), strlen(text));
	CHECK_TEXT(text, "cannot read disk at byte 4096: it is broken. Buy another");
}

TEST(what_is_not_known_leaves_no_hole_in_the_line)
{
	struct pen_error err;
	char text[300];

	error_set(&err, -EIO, "plan", NULL, -1, "no");
	pen_error_format(&err, text, sizeof(text));
	CHECK_TEXT(text, "cannot plan: no");
	error_set(&err, -EIO, "read", "x", 0, "no");
	pen_error_format(&err, text, sizeof(text));
	CHECK_TEXT(text, "cannot read x at byte 0: no");
}

TEST(a_line_has_nothing_that_a_terminal_obeys_and_the_record_has_the_name_itself)
{
	struct pen_error err;
	char text[300];

	error_set(&err, -EIO, "read", "a\x1b[2J\n", -1, "it is in \xc2\x9b\x9b");
	error_hint(&err, "Rename \xe2\x80\xae");
	CHECK_EQ(pen_error_format(&err, text, sizeof(text)), strlen(text));
	CHECK_TEXT(text, "cannot read a\\x1b[2J\\n: it is in \\u009b\\x9b. Rename \\u202e");
	CHECK_TEXT(err.object, "a\x1b[2J\n");
	CHECK_TEXT(err.message, "it is in \xc2\x9b\x9b");
}

TEST(a_line_is_cut_to_its_room_and_tells_its_length)
{
	struct pen_error err;
	char text[12];
	int length;

	error_set(&err, -EIO, "read", "disk", -1, "broken");
	length = pen_error_format(&err, text, sizeof(text));
	CHECK_EQ(length, strlen("cannot read disk: broken"));
	CHECK_TEXT(text, "cannot read");
	CHECK_EQ(pen_error_format(&err, NULL, 0), length);
}

TEST(long_names_keep_their_end)
{
	struct pen_error err;
	char name[1000];

	memset(name, 'x', sizeof(name));
	strcpy(name + sizeof(name) - 13, "/the-end.bin");
	error_sys(&err, -EIO, "an operation with a name of more than 31 bytes", name, -1);
	CHECK_EQ(strlen(err.object), sizeof(err.object) - 1);
	CHECK(!strncmp(err.object, "...xxx", 6));
	CHECK_TEXT(err.object + strlen(err.object) - 12, "/the-end.bin");
	CHECK_EQ(strlen(err.operation), sizeof(err.operation) - 1);
}

TEST(long_messages_and_hints_are_terminated)
{
	struct pen_error err;
	char text[3000];

	memset(text, 'm', sizeof(text));
	text[sizeof(text) - 1] = 0;
	error_set(&err, -EIO, "read", "x", -1, "%s", text);
	error_hint(&err, "%s", text);
	CHECK_EQ(strlen(err.message), sizeof(err.message) - 1);
	CHECK_EQ(strlen(err.hint), sizeof(err.hint) - 1);
}

TEST(a_null_record_costs_nothing)
{
	CHECK_EQ(error_sys(NULL, -EIO, "read", "x", 0), -EIO);
	CHECK_EQ(error_set(NULL, -EINVAL, "read", "x", 0, "%d", 1), -EINVAL);
	CHECK_EQ(error_vendor(NULL, -ENODEV, PEN_DOMAIN_CUDA, 1, "read", "x", "no"), -ENODEV);
	error_hint(NULL, "no");
	error_clear(NULL);
}

TEST(the_first_hint_stays)
{
	struct pen_error err;

	error_set(&err, -EIO, "read", "x", -1, "no");
	error_hint(&err, "near %d", 1);
	error_hint(&err, "far");
	CHECK_TEXT(err.hint, "near 1");
	/* A new error is a new record: nothing of the old one stays. */
	error_sys(&err, -EIO, "read", "x", -1);
	CHECK_TEXT(err.hint, "");
}

TEST(a_vendor_error_keeps_the_vendors_code)
{
	struct pen_error err;

	CHECK_EQ(error_vendor(&err, -ENOMEM, PEN_DOMAIN_CUDA, 2, "allocate on", "cuda:0", "out"),
		 -ENOMEM);
	CHECK_EQ(err.domain, PEN_DOMAIN_CUDA);
	CHECK_EQ(err.raw, 2);
	CHECK_EQ(err.offset, -1);
	error_clear(&err);
	CHECK_EQ(err.code, 0);
	CHECK_EQ(err.offset, -1);
	CHECK_TEXT(err.message, "");
}

TEST(every_errno_has_the_name_that_the_c_library_gives_it)
{
	for (int number = -2; number < 300; number++) {
		const char *ours = error_name(number), *theirs = strerrorname_np(number);

		/* 0 is "0" there, and no error here. */
		if (number <= 0 || !theirs)
			CHECK(!ours);
		else
			CHECK_TEXT(ours, theirs);
	}
}

TEST_MAIN
